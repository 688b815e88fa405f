"""Pure decode steps as CUDA graphs: captured at start for a few numbers of rows, replayed with padding rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from attrs import frozen

from trivet.runtime.capture import WARM_UP_RUNS, CapturedPlans, GraphPool, padded
from trivet.runtime.inputs import SAMPLES, StepInputs
from trivet.sampling.batch import SampleGroups
from trivet.sampling.layout import VALUES_PER_SAMPLE
from trivet.sampling.logprobs import TokenLogprob, token_logprobs, unpacked
from trivet.sampling.sampler import HostSamples, SampleResult
from trivet.scheduler.plan import StepPlan

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From token ids ``[rows]`` and slots ``[rows]`` of decode rows to their logits ``[rows, vocabulary]``."""

Sample = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SampleGroups], SampleResult]
"""From logits, slots, positions and groups to the new tokens of the rows."""

GroupsOf = Callable[[int], SampleGroups]
"""The groups by which a number of rows is sampled, always with the same work."""

CAPTURED_ALTERNATIVES = 20
"""Alternatives that captured log-probabilities report; a request that wants more has its step's taken one by one."""


@frozen(eq=False)
class Bucket:
    """The graphs of one number of rows.

    Attributes:
        rows: rows of the captured step, padding rows included.
        forward: from the newest tokens of the rows' slots to logits.
        logits: ``[rows, vocabulary]``, what `forward` writes.
        sample: by kind, from `logits` to new tokens, which become the newest of their slots.
        samples: what those write, as `SampleResult.packed` lays it out.
        score: from `logits` and `samples` to the tokens' log-probabilities.
        scored: `samples` and what `score` writes, in one tensor.
    """

    rows: int
    forward: torch.cuda.CUDAGraph
    logits: torch.Tensor
    sample: Mapping[str, torch.cuda.CUDAGraph]
    samples: torch.Tensor
    score: torch.cuda.CUDAGraph
    scored: torch.Tensor

    def draw(self, kind: str, groups: SampleGroups) -> CapturedSamples:
        """Queue the sampling of the rows whose logits are in place; `groups` says who wants log-probabilities."""
        self.sample[kind].replay()
        if not groups.scored:
            return CapturedSamples(self.rows, self.samples, groups)
        self.score.replay()
        return CapturedSamples(self.rows, self.scored, groups)


@frozen(eq=False)
class CapturedSamples:
    """What a captured step sampled, as `SampleResult` is used by who waits for it.

    Attributes:
        rows: rows of the captured step, padding rows included.
        values: tokens and flags, and behind them each row's log-probabilities where they were taken.
        groups: who wants log-probabilities, and how many.
    """

    rows: int
    values: torch.Tensor
    groups: SampleGroups

    def packed(self) -> torch.Tensor:
        """Everything in one flat int64 tensor."""
        return self.values

    def unpacked(self, packed: torch.Tensor) -> HostSamples:
        """What `packed` gave, from a copy of it on the host."""
        rows = self.rows
        logprobs: list[TokenLogprob | None] = [None] * rows
        if self.groups.scored:
            wanted = [row for row, _ in self.groups.scored]
            values = packed[VALUES_PER_SAMPLE * rows :].view(rows, -1)[wanted]
            counts = [count for _, count in self.groups.scored]
            for row, value in zip(wanted, unpacked(values, counts), strict=True):
                logprobs[row] = value
        token_ids, bad = packed[: VALUES_PER_SAMPLE * rows].view(VALUES_PER_SAMPLE, rows)
        return HostSamples(token_ids.tolist(), bad.to(torch.bool).tolist(), logprobs)


class DecodeGraphs:
    """One `Bucket` for each number of rows that was captured; a step takes the smallest that holds it.

    Padding rows belong to the padding slot.

    Args:
        plans: updated before each replay, outside the graph.
        inputs: where the rows' slots and positions are read.
        padding_slot: a slot that no request is given.
        forward, sample: what is captured.
        kinds: by name, the groups that are sampled; a graph for each.
    """

    def __init__(
        self,
        plans: CapturedPlans,
        inputs: StepInputs,
        *,
        padding_slot: int,
        forward: Forward,
        sample: Sample,
        kinds: Mapping[str, GroupsOf],
    ) -> None:
        self._plans = plans
        self._inputs = inputs
        self._padding_slot = padding_slot
        self._forward = forward
        self._sample = sample
        self._kinds = kinds
        self._buckets: dict[int, Bucket] = {}
        self._sizes: tuple[int, ...] = ()

    @torch.inference_mode()
    def capture(self, rows: int, pool: GraphPool) -> None:
        """Capture a step of so many rows."""
        self._buckets[rows] = self._captured(rows, pool)
        self._sizes = tuple(sorted(self._buckets))
        self._inputs["slot_tokens"].zero_()

    def bucket_of(self, plan: StepPlan) -> Bucket | None:
        """The bucket that replays `plan`; None for one with chunks, or of more rows than were captured."""
        rows = len(plan.requests)
        if plan.decode_rows != rows or not self._sizes or rows > self._sizes[-1]:
            return None
        return self._buckets[self._sizes[bisect_left(self._sizes, rows)]]

    def replay(self, bucket: Bucket, plan: StepPlan) -> None:
        """Queue the forward of `plan`: afterwards its rows' logits are the first of ``bucket.logits``."""
        padding = bucket.rows - len(plan.requests)
        self._plans.update(plan.kv_lengths, plan.page_indptr, plan.page_indices, bucket.rows)
        self._inputs.fill("slots", padded(plan.slots, padding, self._padding_slot))
        self._inputs.fill("sampled_positions", padded(plan.kv_lengths, padding, 1))
        bucket.forward.replay()

    def close(self) -> None:
        """Drop the graphs and their memory. Idempotent."""
        self._buckets = {}
        self._sizes = ()

    def _captured(self, rows: int, pool: GraphPool) -> Bucket:
        inputs = self._inputs
        inputs.begin()
        self._plans.update_to_padding(rows)
        slots = inputs.fill("slots", np.full(rows, self._padding_slot))
        positions = inputs.fill("sampled_positions", np.ones(rows, dtype=np.int64))
        inputs.end()
        torch.cuda.current_stream(inputs.device).synchronize()
        samples = inputs[SAMPLES][: VALUES_PER_SAMPLE * rows]
        with torch.cuda.stream(pool.stream):
            for _ in range(WARM_UP_RUNS):
                logits = self._forward(inputs["slot_tokens"][slots], slots)
                for groups_of in self._kinds.values():
                    self._sample(logits, slots, positions, groups_of(rows))
                token_logprobs(logits, samples[:rows], CAPTURED_ALTERNATIVES)
            del logits
        pool.stream.synchronize()

        def drawn(groups_of: GroupsOf) -> torch.Tensor:
            return samples.copy_(self._sample(logits, slots, positions, groups_of(rows)).packed())

        def scores() -> torch.Tensor:
            found = token_logprobs(logits, samples[:rows], CAPTURED_ALTERNATIVES)
            return torch.cat((samples, found.packed().flatten()))

        forward, logits = pool.captured(lambda: self._forward(inputs["slot_tokens"][slots], slots))
        sample = {kind: pool.captured(partial(drawn, groups_of))[0] for kind, groups_of in self._kinds.items()}
        score, scored = pool.captured(scores)
        self._plans.note_capture()
        return Bucket(rows, forward, logits, sample, samples, score, scored)
