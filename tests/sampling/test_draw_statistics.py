"""Tokens are drawn with the probabilities that the filtered distribution gives, independently of each other."""

import numpy as np
import pytest
import torch

from trivet.sampling import Sampling
from trivet.sampling.noise import exponential_noise, row_keys, token_hashes
from trivet.sampling.sampler import sample

DRAWS = 20_000
VOCABULARY = 12


def chi_square_excess(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square over the cells that expect anything, as a standard normal deviate (Wilson and Hilferty 1931)."""
    cells = expected > 0
    assert counts[~cells].sum() == 0, "a token with no probability was drawn"
    statistic = float(((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum())
    freedom = int(cells.sum()) - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread)


FILTERS = {
    "temperature alone": Sampling(temperature=0.7),
    "min-p": Sampling(temperature=1.3, min_p=0.2),
    "top-k": Sampling(temperature=0.9, top_k=5),
    "top-p": Sampling(temperature=1.0, top_p=0.7),
    "all of them": Sampling(temperature=1.5, top_k=9, top_p=0.8, min_p=0.15),
}


@pytest.mark.parametrize("varied", ["seeds", "positions"])
@pytest.mark.parametrize("name", FILTERS)
def test_frequencies_match_the_filtered_softmax(make_batch, name: str, varied: str) -> None:
    sampling = FILTERS[name]
    logits = torch.linspace(1.5, -1.5, VOCABULARY)[torch.randperm(VOCABULARY)]
    probabilities = np.exp(logits.double().numpy() / sampling.temperature)
    order = np.argsort(-probabilities)
    if sampling.top_k:
        probabilities[order[sampling.top_k :]] = 0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= sampling.top_p]] = 0
    probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
    probabilities /= probabilities.sum()

    batch = make_batch(1, VOCABULARY)
    batch.bind(0, sampling, [0], seed=1234)
    slots = torch.zeros(DRAWS, dtype=torch.int64)
    groups = batch.groups(slots)
    positions = torch.arange(DRAWS)
    if varied == "seeds":
        # One request after another in the same slot, all at one position.
        batch = make_batch(DRAWS, VOCABULARY)
        for slot in range(DRAWS):
            batch.bind(slot, sampling, [0], seed=slot)
        slots, positions = torch.arange(DRAWS), torch.full((DRAWS,), 17)
        groups = batch.groups(slots)
    tokens = sample(batch, logits.expand(DRAWS, -1), slots, positions, groups).token_ids
    counts = np.bincount(tokens.numpy(), minlength=VOCABULARY)
    assert chi_square_excess(counts, probabilities * DRAWS) < 5


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, tokens: int) -> np.ndarray:
    noise = exponential_noise(token_hashes(tokens, "cpu"), row_keys(seeds, positions))
    return np.exp(-noise.double().numpy())


@pytest.mark.parametrize("neighbours", ["seeds", "positions", "tokens"])
def test_noise_of_neighbouring_keys_is_uniform_and_independent(neighbours: str) -> None:
    count = 200
    seeds, positions = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    if neighbours == "positions":
        positions = torch.arange(count)
    else:
        seeds = torch.arange(count)
    values = uniforms(seeds, positions, 1000)
    if neighbours == "tokens":
        values = values.T
    pairs = np.stack([values[:-1].ravel(), values[1:].ravel()])
    cells = np.histogram2d(*pairs, bins=8, range=[[0, 1], [0, 1]])[0]
    assert chi_square_excess(cells.ravel(), np.full(64, pairs.shape[1] / 64)) < 5
    for lag in (1, 2, 7):
        left, right = values[:-lag].ravel(), values[lag:].ravel()
        assert abs(np.corrcoef(left, right)[0, 1]) * np.sqrt(left.size) < 5


def test_the_order_of_seed_and_position_matters() -> None:
    ones, twos = torch.tensor([1]), torch.tensor([2])
    assert not np.array_equal(uniforms(ones, twos, 64), uniforms(twos, ones, 64))


def test_noise_is_finite_positive_and_fine_enough_near_zero() -> None:
    rows = torch.arange(64)
    noise = exponential_noise(token_hashes(50_000, "cpu"), row_keys(rows, rows))
    assert torch.isfinite(noise).all()
    assert (noise > 0).all()
    # Three million draws: the smallest is expected at 3e-7, and steps of 2**-24 there would repeat values.
    smallest = noise.flatten().sort().values[:200]
    assert smallest[0] < 5e-6
    assert len(smallest.unique()) >= 198


def test_improbable_tokens_are_drawn_as_often_as_they_should(make_batch) -> None:
    """One token in a thousand of probability 1e-3: a coarse uniform would draw it too often or never."""
    draws = 40_000
    batch = make_batch(1, 2)
    batch.bind(0, Sampling(temperature=1.0, seed=5), [0])
    logits = torch.tensor([[0.0, float(np.log(1e-3))]]).expand(draws, -1)
    slots, positions = torch.zeros(draws, dtype=torch.int64), torch.arange(draws)
    drawn = int(sample(batch, logits, slots, positions).token_ids.sum())
    expected = draws * 1e-3 / 1.001
    assert abs(drawn - expected) < 5 * np.sqrt(expected)


@pytest.mark.parametrize("half", [0, 1])
def test_all_64_bits_of_a_row_s_key_reach_its_noise(half: int) -> None:
    """With half of them lost, requests in the tens of thousands would share whole rows of noise."""
    rows = torch.arange(12)
    keys = list(row_keys(rows, rows))
    keys[1 - half] = torch.zeros(12, dtype=torch.int32)
    values = np.exp(-exponential_noise(token_hashes(4000, "cpu"), (keys[0], keys[1])).double().numpy())
    correlations = np.corrcoef(values)[np.triu_indices(12, 1)]
    assert np.abs(correlations).max() * np.sqrt(4000) < 5
