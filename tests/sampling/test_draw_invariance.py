"""Equal logits, seed and position give equal tokens: alone, beside others, in any place, after a restart."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trivet.sampling import Sampling, penalty_layout, sampler_layout
from trivet.sampling import layout as sampling_layout
from trivet.sampling.batch import SamplingBatch
from trivet.sampling.sampler import sample

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-300, 0.3, 1.0, 2.5, 1e300]),
    top_k=st.sampled_from([0, 1, 3, 40, 10**9]),
    top_p=st.sampled_from([1e-9, 0.2, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 1e-300]),
    presence_penalty=st.sampled_from([0.0, 0.7, 1e300]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 3]),
)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_row_draws_the_same_alone_and_in_any_place_of_any_batch(sample_rows_of, data: st.DataObject) -> None:
    rows = data.draw(st.integers(2, 9))
    vocabulary = data.draw(st.sampled_from([5, 33, 700]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    scale = data.draw(st.sampled_from([0.3, 3.0, 30.0]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    logits = (torch.randn(rows, vocabulary, generator=generator) * scale).to(dtype)
    requests = [data.draw(samplings) for _ in range(rows)]
    positions = data.draw(st.lists(st.integers(0, 2**31), min_size=rows, max_size=rows))
    outputs = [[int(token) for token in torch.randint(vocabulary, (4,), generator=generator)] for _ in range(rows)]

    together = sample_rows_of(logits, requests, range(rows), positions, outputs)
    order = data.draw(st.permutations(range(rows)))
    permuted = sample_rows_of(
        logits[list(order)],
        [requests[row] for row in order],
        list(order),
        [positions[row] for row in order],
        [outputs[row] for row in order],
    )
    assert [permuted.token_ids[order.index(row)] for row in range(rows)] == together.token_ids
    alone = [
        sample_rows_of(logits[row : row + 1], [requests[row]], [row], [positions[row]], [outputs[row]])
        for row in range(rows)
    ]
    assert [result.token_ids[0] for result in alone] == together.token_ids
    assert [result.logprobs[0] for result in alone] == together.logprobs
    general = sample_rows_of(logits, requests, range(rows), positions, outputs, general=True)
    assert general.token_ids == together.token_ids


@pytest.fixture(scope="module")
def sample_rows_of():
    """`sample_rows`, living as long as hypothesis needs it."""

    def run(logits, requests, seeds, positions, outputs, general=False):
        rows, vocabulary = logits.shape
        batch = SamplingBatch(
            sampler_layout(rows, vocabulary).allocate("cpu"), penalty_layout(rows, vocabulary).allocate("cpu")
        )
        for row in range(rows):
            batch.bind(row, requests[row], [0, 1], seed=list(seeds)[row])
            for token in outputs[row]:
                batch.accept(torch.tensor([row]), torch.tensor([token]))
        groups = batch.any_groups(rows) if general else None
        return sample(batch, logits, torch.arange(rows), torch.tensor(positions), groups).to_host()

    return run


def test_rows_taken_in_turns_draw_as_all_at_once(sample_rows, monkeypatch) -> None:
    logits = torch.randn(10, 50)
    requests = [Sampling(temperature=0.8, top_p=0.9 if row % 2 else 1.0, logprobs=2) for row in range(10)]
    at_once = sample_rows(logits, requests)
    monkeypatch.setattr(sampling_layout, "CHUNK_ELEMENTS_CPU", 120)
    assert sample_rows(logits, requests) == at_once


def test_a_short_list_of_candidates_draws_as_the_whole_vocabulary_sorted(make_batch) -> None:
    """On the CPU a top-p row first looks at a few candidates; flat and peaked rows side by side take both ways."""
    rows, vocabulary = 40, 3000
    batch = make_batch(rows, vocabulary)
    for row in range(rows):
        batch.bind(row, Sampling(temperature=1.0, top_p=0.95), [0], seed=row)
    logits = torch.randn(rows, vocabulary) * torch.linspace(0.1, 8, rows).unsqueeze(-1)
    slots = torch.arange(rows)
    adaptive = sample(batch, logits, slots, slots).token_ids
    # A top-k of the whole vocabulary leaves the same distribution, and orders all of it.
    for row in range(rows):
        batch.bind(row, Sampling(temperature=1.0, top_p=0.95, top_k=vocabulary), [0], seed=row)
    assert torch.equal(adaptive, sample(batch, logits, slots, slots).token_ids)
    assert torch.equal(adaptive, sample(batch, logits, slots, slots, batch.any_groups(rows)).token_ids)


def test_a_slot_s_next_request_draws_as_in_a_fresh_one(make_batch) -> None:
    used, logits = make_batch(1, 300), torch.randn(1, 300)
    slots, positions = torch.tensor([0]), torch.tensor([4])
    kinds = [{}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.3}, {"temperature": 0.0}, {"frequency_penalty": 2.0}] * 3
    for seed in torch.randperm(len(kinds)).tolist():
        request = Sampling(**{"temperature": 1.5, **kinds[seed]})
        fresh = make_batch(1, 300)
        for batch in (used, fresh):
            batch.bind(0, request, [1, 2], seed=seed)
            batch.accept(slots, torch.tensor([int(logits.argmax())]))
        assert sample(used, logits, slots, positions).to_host() == sample(fresh, logits, slots, positions).to_host()
        used.release(0)


def test_seeds_are_taken_modulo_two_to_the_64th(sample_rows) -> None:
    logits = torch.randn(1, 500).expand(2, -1)
    for seed in (-1, -(2**63), -17):
        requests = [Sampling(temperature=2.0, seed=seed), Sampling(temperature=2.0, seed=seed % 2**64)]
        first, second = sample_rows(logits, requests, positions=[9, 9]).token_ids
        assert first == second


def test_a_request_without_a_seed_draws_from_the_one_it_is_given(sample_rows) -> None:
    logits = torch.zeros(64, 1000)
    none = sample_rows(logits, [Sampling(temperature=1.0)] * 64, seeds=range(64)).token_ids
    own = sample_rows(logits, [Sampling(temperature=1.0, seed=row) for row in range(64)], seeds=[9] * 64).token_ids
    assert none == own
    assert len(set(none)) > 50


def test_a_slot_whose_binding_was_broken_off_is_written_anew(
    make_batch: Callable[[int, int], SamplingBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(2, 10)
    first, second = Sampling(temperature=1.0, top_k=3, seed=1), Sampling(temperature=0.5, top_k=4, seed=2)
    batch.bind(0, first, [0])

    class Failing:
        def __setitem__(self, slot: int, value: float) -> None:
            raise MemoryError

    inner = batch._buffers
    broken = {name: batch[name] for name in ("temperature", "top_k", "top_p", "min_p")} | {"seed": Failing()}
    monkeypatch.setattr(batch, "_buffers", broken)
    with pytest.raises(MemoryError):
        batch.bind(0, second, [0])
    monkeypatch.setattr(batch, "_buffers", inner)
    batch.bind(0, first, [0])
    assert (batch["temperature"][0], batch["top_k"][0], batch["seed"][0]) == (1.0, 3, 1)
