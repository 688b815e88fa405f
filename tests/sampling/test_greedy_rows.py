"""Greedy rows take the largest logit, and the step spends nothing on what no row asks for."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trivet.errors import PluginError
from trivet.sampling import Sampling
from trivet.sampling.batch import PLAIN
from trivet.sampling.sampler import sample


class CountOperations(TorchDispatchMode):
    """How many torch operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_id_of_the_largest(sample_rows, dtype: torch.dtype) -> None:
    logits = torch.randint(0, 3, (50, 3000)).to(dtype)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sample_rows(logits, [Sampling()] * 50).token_ids == expected
    # The same through the penalised way, with nothing to penalise.
    assert sample_rows(logits, [Sampling(frequency_penalty=0.1)] * 50).token_ids == expected


def test_a_greedy_step_is_a_handful_of_operations_however_many_rows(make_batch) -> None:
    batch = make_batch(64, 500)
    for slot in range(64):
        batch.bind(slot, Sampling(top_p=0.5, top_k=3), [0])
    assert batch.groups(list(range(64))) is PLAIN
    logits, slots = torch.randn(64, 500), torch.arange(64)
    with CountOperations() as counter:
        sample(batch, logits, slots, slots, PLAIN)
    assert counter.operations <= 8


def test_operations_do_not_grow_with_the_rows(make_batch) -> None:
    batch = make_batch(64, 100)
    for slot in range(64):
        batch.bind(slot, Sampling(temperature=1.0, top_k=5 * (slot % 2), frequency_penalty=0.1), [0])
    counts = []
    for rows in (2, 64):
        slots = torch.arange(rows)
        groups = batch.groups(slots)
        with CountOperations() as counter:
            sample(batch, torch.randn(rows, 100), slots, slots, groups)
            batch.accept(slots, slots, groups)
        counts.append(counter.operations)
    assert counts[0] == counts[1]


def test_only_rows_that_ask_for_it_are_ordered(make_batch) -> None:
    batch = make_batch(8, 100)
    batch.bind(3, Sampling(temperature=1.0, top_k=5), [0])
    batch.bind(5, Sampling(temperature=1.0), [0])
    groups = batch.groups([0, 3, 5, 7])
    assert {(group.choice.name, tuple(group.rows.tolist())) for group in groups.special} == {
        ("AMONG_FIRST", (1,)),
        ("DRAWN", (2,)),
    }


def test_a_released_slot_is_greedy_again(make_batch) -> None:
    batch = make_batch(2, 10)
    batch.bind(0, Sampling(temperature=1.0, logprobs=2, frequency_penalty=1.0), [0])
    batch.release(0)
    batch.release(0)
    assert batch.groups([0]) is PLAIN


def test_logits_of_another_width_are_refused(make_batch) -> None:
    batch = make_batch(2, 10)
    with pytest.raises(PluginError, match=r"\[2, 11\].*\[rows, 10\]"):
        sample(batch, torch.zeros(2, 11), torch.arange(2), torch.arange(2))


def test_the_padding_slot_cannot_be_bound(make_batch) -> None:
    batch = make_batch(2, 10)
    assert batch.padding_slot == 2
    with pytest.raises(IndexError):
        batch.bind(2, Sampling(), [0])


def test_logits_are_left_as_they_were(make_batch) -> None:
    batch = make_batch(6, 40)
    kinds = [{}, {"top_p": 0.5}, {"top_k": 4}, {"min_p": 0.1}, {"frequency_penalty": 0.2}, {"temperature": 0.0}]
    for slot, kind in enumerate(kinds):
        batch.bind(slot, Sampling(**{"temperature": 1.0, "logprobs": 3, **kind}), [0])
    logits = torch.randn(6, 40)
    before = logits.clone()
    sample(batch, logits, torch.arange(6), torch.arange(6))
    assert torch.equal(logits, before)
