"""Penalties: the conventions of Hugging Face (repetition) and of the OpenAI API (presence, frequency)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from trivet.sampling import Sampling, penalty_layout, sampler_layout
from trivet.sampling.batch import SamplingBatch

VOCABULARY = 30
token_lists = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)


def penalised(logits: torch.Tensor, sampling: Sampling, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The penalised logits of one row."""
    batch = SamplingBatch(sampler_layout(2, VOCABULARY).allocate("cpu"), penalty_layout(2, VOCABULARY).allocate("cpu"))
    # Another request was in the slot before, and one is beside it.
    batch.bind(1, sampling, list(range(VOCABULARY)))
    batch.accept(torch.tensor([1, 1]), torch.tensor([3, 4]))
    batch.release(1)
    batch.bind(0, sampling, [5])
    batch.bind(1, sampling, prompt)
    for token in output:
        batch.accept(torch.tensor([0, 1]), torch.tensor([7, token]))
    slots = torch.tensor([1])
    parameters = [batch[f"{name}_penalty"][slots] for name in ("repetition", "presence", "frequency")]
    return batch.penalties.apply(logits.clone().unsqueeze(0), slots, *parameters)[0]


@given(st.integers(0, 2**31), token_lists, token_lists, st.sampled_from([0.5, 1.2, 3.0]))
@settings(max_examples=40, deadline=None)
def test_repetition_penalty_equals_transformers(seed: int, prompt: list[int], output: list[int], value: float) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    processor = RepetitionPenaltyLogitsProcessor(value)
    expected = processor(torch.tensor([prompt + output]), logits.clone().unsqueeze(0))[0]
    torch.testing.assert_close(penalised(logits, Sampling(repetition_penalty=value), prompt, output), expected)


@given(st.integers(0, 2**31), token_lists, token_lists)
@settings(max_examples=40, deadline=None)
def test_presence_and_frequency_count_the_output_alone(seed: int, prompt: list[int], output: list[int]) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    expected = logits.clone()
    for token in set(output):
        expected[token] -= 0.6 + 0.25 * output.count(token)
    sampling = Sampling(presence_penalty=0.6, frequency_penalty=0.25)
    torch.testing.assert_close(penalised(logits, sampling, prompt, output), expected)


def test_repetition_comes_before_presence_and_frequency() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[2] = 3.0
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
    assert float(penalised(logits, sampling, [0], [2, 2])[2]) == 3.0 / 2.0 - 1.0 - 2 * 0.5


def test_a_greedy_row_takes_the_largest_penalised_logit(sample_rows) -> None:
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    request = [Sampling(frequency_penalty=0.2)]
    assert sample_rows(logits, request, prompts=[[0, 0]]).token_ids == [0]
    assert sample_rows(logits, request, outputs=[[0]]).token_ids == [1]


@pytest.mark.parametrize("cached", [True, False])
def test_accepting_a_step_counts_the_rows_with_penalties_and_no_others(make_batch, cached: bool) -> None:
    batch = make_batch(4, VOCABULARY)
    for slot, penalty in enumerate([0.0, 0.5, 0.0, 0.5]):
        batch.bind(slot, Sampling(frequency_penalty=penalty), [0])
    counts = batch.penalties._output_counts
    before = counts.clone()
    slots = torch.tensor([3, 0, 1, 3])
    groups = batch.groups([3, 0, 1, 3]) if cached else None
    batch.accept(slots, torch.tensor([9, 9, 8, 9]), groups)
    changes = (counts - before).nonzero().tolist()
    assert changes == [[1, 8], [3, 9]]
    assert int(counts[3, 9]) == 2


def test_neutral_penalties_change_no_bit() -> None:
    logits = torch.randn(VOCABULARY)
    logits[4] = -torch.inf
    assert torch.equal(penalised(logits, Sampling(), [1, 2], []), logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [1e308, -1e308])
def test_penalties_past_the_end_of_float32_bring_back_nothing_that_the_model_ruled_out(
    sample_rows, temperature: float, value: float
) -> None:
    logits = torch.full((20, VOCABULARY), -torch.inf)
    logits[:, 7:9] = torch.randn(20, 2)
    request = Sampling(temperature=temperature, presence_penalty=value, frequency_penalty=value)
    result = sample_rows(logits, [request] * 20, outputs=[[7, 7, 8, 8]] * 20)
    assert result.bad == [False] * 20
    assert set(result.token_ids) <= {7, 8}
