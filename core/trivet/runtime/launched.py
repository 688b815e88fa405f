"""A step that was given to the device and not yet taken into account."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from trivet.runtime.graphs import CapturedSamples
from trivet.sampling.logprobs import TokenLogprob, unpacked
from trivet.sampling.sampler import HostSamples, SampleResult
from trivet.scheduler.plan import StepPlan

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@frozen(eq=False)
class Results:
    """What a step gives, on its way to the host.

    Attributes:
        sampled: the new tokens of ``plan.sampling_rows``, and of padding rows behind them; None without such rows.
        packed: the same on the host, as they pack it.
        scores: by row, the log-probabilities of a scored prompt's tokens on the host, block by block.
        done: passed once the host's copies are there; None if they are there.
    """

    sampled: SampleResult | CapturedSamples | None
    packed: Tensor | None
    scores: dict[int, list[Tensor]]
    done: torch.cuda.Event | None

    def wait(self) -> tuple[HostSamples | None, dict[int, list[TokenLogprob]]]:
        """The values, once the device has computed them. A fault of the device shows here."""
        if self.done is not None:
            self.done.synchronize()
        samples = None
        if self.sampled is not None:
            assert self.packed is not None
            samples = self.sampled.unpacked(self.packed)
        scores = {row: [value for block in blocks for value in unpacked(block)] for row, blocks in self.scores.items()}
        return samples, scores


@frozen(eq=False)
class Launched:
    """A step in flight.

    Attributes:
        plan: what the scheduler planned.
        results: what it gives.
        started_s: when it was planned, by `time.perf_counter`.
    """

    plan: StepPlan
    results: Results
    started_s: float
