"""Log-probabilities are those of the model's own distribution, whatever the token was drawn by."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trivet.sampling import Sampling, sampler_scratch_bytes
from trivet.sampling.logprobs import token_logprobs
from trivet.sampling.params import LOGPROBS_MAX
from trivet.sampling.sampler import sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_equal_log_softmax_in_float32(dtype: torch.dtype) -> None:
    logits = (torch.randn(40, 300) * 4).to(dtype)
    targets = torch.randint(300, (40,))
    expected = torch.log_softmax(logits.float(), -1)
    for row, value in enumerate(token_logprobs(logits, targets, top=20).tolist()):
        assert value.token_id == int(targets[row])
        assert value.logprob == float(expected[row, targets[row]])
        ranked = sorted(range(300), key=lambda token: (-float(logits[row, token]), token))[:20]
        assert value.top == tuple((token, float(expected[row, token])) for token in ranked)


@pytest.mark.parametrize("top", [0, 7, 50])
def test_as_many_alternatives_as_asked_for_up_to_the_vocabulary(top: int) -> None:
    values = token_logprobs(torch.randn(3, 7), torch.tensor([0, 1, 2]), top).tolist()
    assert [len(value.top) for value in values] == [min(top, 7)] * 3


def test_sampling_reports_the_unmodified_distribution_for_the_rows_that_ask(sample_rows) -> None:
    logits = torch.randn(5, 60)
    skewed = {"temperature": 0.4, "top_k": 3, "repetition_penalty": 1.7, "frequency_penalty": 1.0}
    asked = [None, 0, 3, 20, None]
    result = sample_rows(
        logits, [Sampling(logprobs=top, **skewed) for top in asked], outputs=[[1, 2, 3]] * 5, prompts=[[4]] * 5
    )
    expected = torch.log_softmax(logits, -1)
    for row, top in enumerate(asked):
        value = result.logprobs[row]
        if top is None:
            assert value is None
            continue
        assert value is not None
        assert value.token_id == result.token_ids[row]
        assert value.logprob == float(expected[row, value.token_id])
        best = expected[row].topk(top)
        assert [logprob for _, logprob in value.top] == best.values.tolist()


def test_samples_cross_to_the_host_in_one_transfer(make_batch) -> None:
    batch = make_batch(4, 30)
    for slot, top in enumerate([None, 2, 0, 5]):
        batch.bind(slot, Sampling(temperature=1.0, logprobs=top), [0])
    logits = torch.randn(4, 30)
    logits[2, 0] = torch.nan
    result = sample(batch, logits, torch.arange(4), torch.arange(4))
    packed = result.packed()
    assert packed.dtype == torch.int64
    assert packed.dim() == 1
    host = result.unpacked(packed.clone())
    assert host.token_ids == result.token_ids.tolist()
    assert host.bad == [False, False, True, False]
    assert [None if value is None else len(value.top) for value in host.logprobs] == [None, 2, 0, 5]


@pytest.mark.parametrize(
    ("asked", "rows", "vocabulary"),
    [
        ({"temperature": 1.0}, 30, 20_000),
        ({"temperature": 1.0, "top_p": 0.99, "frequency_penalty": 0.1}, 30, 20_000),
        ({"logprobs": LOGPROBS_MAX}, 30, 20_000),
        ({"logprobs": LOGPROBS_MAX}, 300, LOGPROBS_MAX),
    ],
    ids=["drawn", "sorted", "scored", "many scored"],
)
def test_what_is_held_stays_within_its_stated_bound(
    make_batch, asked: dict[str, float], rows: int, vocabulary: int
) -> None:
    batch = make_batch(rows, vocabulary)
    for slot in range(rows):
        batch.bind(slot, Sampling(**asked), [0])
    logits, slots = torch.randn(rows, vocabulary), torch.arange(rows)
    groups = batch.groups(slots)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = sample(batch, logits, slots, slots, groups)
        result.packed()
    held = most = 0
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert most > vocabulary * 4
    assert most <= sampler_scratch_bytes(rows, vocabulary, "cpu") + 2**16, "small [rows] tensors aside"
