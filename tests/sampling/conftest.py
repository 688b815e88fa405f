"""Sampling batches of any size, and one call that samples rows as a runtime would."""

from collections.abc import Callable, Sequence

import pytest
import torch

from trivet.sampling import Sampling, penalty_layout, sampler_layout
from trivet.sampling.batch import SamplingBatch
from trivet.sampling.sampler import HostSamples, sample

MakeBatch = Callable[[int, int], SamplingBatch]
SampleRows = Callable[..., HostSamples]


@pytest.fixture(autouse=True)
def fresh_inputs() -> None:
    """Inputs differ from run to run; the seed is shown with a failure."""
    print(f"torch seed: {torch.seed()}")


@pytest.fixture
def make_batch() -> MakeBatch:
    """A batch of so many slots over so large a vocabulary, in buffers that held other things before."""

    def make(slots: int, vocabulary: int) -> SamplingBatch:
        buffers = sampler_layout(slots, vocabulary).allocate("cpu")
        penalties = penalty_layout(slots, vocabulary).allocate("cpu")
        penalties["output_counts"].fill_(77)
        penalties["in_prompt"].fill_(True)
        return SamplingBatch(buffers, penalties)

    return make


@pytest.fixture
def sample_rows(make_batch: MakeBatch) -> SampleRows:
    """Sample rows in a fresh batch: each row with its own request, prompt, output so far, seed and position."""

    def run(
        logits: torch.Tensor,
        samplings: Sequence[Sampling],
        seeds: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        outputs: Sequence[Sequence[int]] | None = None,
        general: bool = False,
    ) -> HostSamples:
        rows, vocabulary = logits.shape
        batch = make_batch(rows, vocabulary)
        for row, sampling in enumerate(samplings):
            batch.bind(row, sampling, prompts[row] if prompts else [0], seed=seeds[row] if seeds else row)
            for token in outputs[row] if outputs else ():
                batch.accept(torch.tensor([row]), torch.tensor([token]))
        slots = torch.arange(rows)
        places = torch.tensor(list(positions) if positions else [1] * rows)
        groups = batch.any_groups(rows) if general else None
        return sample(batch, logits, slots, places, groups).to_host()

    return run
