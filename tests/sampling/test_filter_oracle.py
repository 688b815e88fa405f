"""Which tokens can be drawn, against a plain oracle: top-k, then top-p of what is left, then min-p of what is left."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trivet.sampling import Sampling, penalty_layout, sampler_layout
from trivet.sampling.batch import SamplingBatch
from trivet.sampling.ranking import ranked_tokens
from trivet.sampling.sampler import sample


def possible_tokens(logits: np.ndarray, sampling: Sampling) -> set[int]:
    scaled = logits.astype(np.float64) / sampling.temperature
    probabilities = np.exp(scaled - scaled.max())
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(probabilities[token] for token in order)
    kept, reached = [], 0.0
    for token in order:
        if reached >= sampling.top_p:
            break
        kept.append(token)
        reached += probabilities[token] / total
        # Within rounding of a boundary either answer is right, and no example should hang on it.
        assume(sampling.top_p == 1.0 or abs(reached - sampling.top_p) > 1e-5)
    ratios = [probabilities[token] / probabilities[kept[0]] for token in kept]
    assume(all(abs(ratio - sampling.min_p) > 1e-5 or ratio == 1.0 for ratio in ratios))
    return {token for token, ratio in zip(kept, ratios, strict=True) if ratio >= sampling.min_p}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_exactly_the_tokens_of_the_oracle_are_drawn(data: st.DataObject) -> None:
    vocabulary = data.draw(st.integers(1, 9))
    # Few distinct values, so that ties at every threshold are common.
    values = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0])
    logits = np.array(data.draw(st.lists(values, min_size=vocabulary, max_size=vocabulary)), dtype=np.float32)
    sampling = Sampling(
        temperature=data.draw(st.sampled_from([0.7, 1.0, 3.0])),
        top_k=data.draw(st.integers(0, 10)),
        top_p=data.draw(st.sampled_from([1.0, 0.97, 0.8, 0.5, 0.31, 1e-6])),
        min_p=data.draw(st.sampled_from([0.0, 0.0, 0.11, 0.37, 1.0])),
    )
    expected = possible_tokens(logits, sampling)
    draws = 3000
    batch = SamplingBatch(sampler_layout(1, vocabulary).allocate("cpu"), penalty_layout(1, vocabulary).allocate("cpu"))
    batch.bind(0, sampling, [0], seed=data.draw(st.integers(0, 2**32)))
    rows = torch.from_numpy(logits).expand(draws, -1)
    tokens = sample(batch, rows, torch.zeros(draws, dtype=torch.int64), torch.arange(draws)).token_ids
    assert set(tokens.tolist()) <= expected
    # The least probable token that may be drawn has a probability above 1e-3 / 9 in every example.
    probabilities = np.exp(logits.astype(np.float64) / sampling.temperature)
    share = {token: probabilities[token] / sum(probabilities[other] for other in expected) for token in expected}
    assert {token for token in expected if share[token] > 0.01} <= set(tokens.tolist())


@pytest.mark.parametrize("count", [1, 7, 64, 199, 200])
def test_ranking_breaks_ties_by_the_lowest_id(count: int) -> None:
    logits = torch.randint(-3, 4, (20, 200)).float() / 2
    logits[:, ::17] = -0.0
    logits[:, ::23] = -torch.inf
    ranked = ranked_tokens(logits, count)
    for row, tokens in zip(logits.tolist(), ranked.tolist(), strict=True):
        assert tokens == sorted(range(200), key=lambda token: (-row[token], token))[:count]


def test_top_k_keeps_exactly_k_of_equal_tokens_lowest_ids_first(sample_rows) -> None:
    logits = torch.zeros(400, 50)
    tokens = sample_rows(logits, [Sampling(temperature=1.0, top_k=3)] * 400).token_ids
    assert set(tokens) == {0, 1, 2}


def test_the_most_probable_token_survives_every_filter(sample_rows) -> None:
    logits = torch.randn(30, 100)
    for tiny in ({"top_p": 1e-300}, {"min_p": 1.0}, {"top_k": 1}, {"top_p": 1e-300, "min_p": 1.0, "top_k": 1}):
        assert sample_rows(logits, [Sampling(temperature=5.0, **tiny)] * 30).token_ids == logits.argmax(-1).tolist()


def test_a_temperature_too_small_for_float32_takes_the_most_probable_token(sample_rows) -> None:
    logits = torch.randn(30, 100)
    assert sample_rows(logits, [Sampling(temperature=1e-300)] * 30).token_ids == logits.argmax(-1).tolist()


def test_tokens_that_the_model_rules_out_are_never_drawn(sample_rows) -> None:
    logits = torch.full((200, 40), -torch.inf)
    logits[:, 7] = -50.0
    logits[:, 9] = -51.0
    for sampling in (
        Sampling(temperature=1e300),
        Sampling(temperature=1e300, top_k=30),
        Sampling(temperature=1e300, top_p=0.99),
        Sampling(temperature=1e300, frequency_penalty=1e300, repetition_penalty=1e-300),
    ):
        assert set(sample_rows(logits, [sampling] * 200, outputs=[[7, 9, 3]] * 200).token_ids) == {7, 9}
