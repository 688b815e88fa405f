"""Pure decode steps as CUDA graphs: captured at start for a few numbers of rows, replayed with padding rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from attrs import frozen

from trivet.attention import PlanOwner, StepBatch
from trivet.errors import ConfigError
from trivet.geometry import AttentionGeometry
from trivet.runtime.inputs import SAMPLES, VALUES_PER_SAMPLE, StepInputs
from trivet.sampling.batch import SampleGroups
from trivet.sampling.logprobs import TokenLogprob, token_logprobs, unpacked
from trivet.sampling.sampler import HostSamples, SampleResult
from trivet.scheduler.plan import StepPlan

WARM_UP_RUNS = 2
"""Eager runs before a capture: what libraries allocate or compile on first use must not be captured."""

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From token ids ``[rows]`` and slots ``[rows]`` of decode rows to their logits ``[rows, vocabulary]``."""

Sample = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SampleGroups], SampleResult]
"""From logits, slots, positions and groups to the new tokens of the rows."""

GroupsOf = Callable[[int], SampleGroups]
"""The groups by which a number of rows is sampled, always with the same work."""

CAPTURED_ALTERNATIVES = 20
"""Alternatives that captured log-probabilities report; a request that wants more has its step's taken one by one."""


@runtime_checkable
class CapturedOwner(Protocol):
    """A plan owner whose decode steps can be captured: it remembers what each graph was planned with."""

    def note_capture(self) -> None:
        """A graph of the plan in place was captured; from now on an `update` that plans otherwise raises."""


@frozen
class _Taken:
    """Memory of a device that is taken.

    Attributes:
        pool_bytes: by torch's allocator.
        driver_bytes: by whatever else.
    """

    pool_bytes: int
    driver_bytes: int

    @classmethod
    def on(cls, device: torch.device) -> _Taken:
        """What is taken now."""
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        pool_bytes = torch.cuda.memory_reserved(device)
        return cls(pool_bytes, total_bytes - free_bytes - pool_bytes)

    def since(self, before: _Taken) -> _Taken:
        """What was taken since `before`."""
        return _Taken(self.pool_bytes - before.pool_bytes, self.driver_bytes - before.driver_bytes)


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

    Padding rows have one token on the padding page and belong to the padding slot. All graphs share one pool of
    memory, which the largest, captured first, sizes.

    Attributes:
        taken: what the graphs take of the device's memory.

    Args:
        owners: of the plans; updated before each replay, outside the graph.
        inputs: where the rows' slots and positions are read.
        padding_page: a page that no request is given.
        padding_slot: a slot that no request is given.
        forward, sample: what is captured.
        kinds: by name, the groups that are sampled; a graph for each.
    """

    def __init__(
        self,
        owners: Mapping[AttentionGeometry, PlanOwner],
        inputs: StepInputs,
        *,
        padding_page: int,
        padding_slot: int,
        forward: Forward,
        sample: Sample,
        kinds: Mapping[str, GroupsOf],
    ) -> None:
        self._owners = owners
        self._inputs = inputs
        self._padding_page = padding_page
        self._padding_slot = padding_slot
        self._forward = forward
        self._sample = sample
        self._kinds = kinds
        self._buckets: dict[int, Bucket] = {}
        self._sizes: tuple[int, ...] = ()
        self.taken = _Taken(0, 0)

    @torch.inference_mode()
    def capture(self, sizes: tuple[int, ...]) -> None:
        """Capture a step of each of `sizes` rows.

        Raises:
            ConfigError: an owner's decode steps cannot be captured.
        """
        for attention, owner in self._owners.items():
            if not isinstance(owner, CapturedOwner):
                raise ConfigError(
                    f"the plan owner of {attention.label} has no note_capture: its decode steps cannot be captured in "
                    "CUDA graphs; use cuda_graphs=False"
                )
        device = self._inputs.device
        before = _Taken.on(device)
        pool: Any = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)
        for rows in sorted(sizes, reverse=True):
            self._buckets[rows] = self._captured(rows, pool, stream)
        self._sizes = tuple(sorted(self._buckets))
        self.taken = _Taken.on(device).since(before)
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
        self._update(plan.query_lengths, plan.kv_lengths, plan.page_indptr, plan.page_indices, padding)
        self._inputs.fill("slots", self._padded(plan.slots, padding, self._padding_slot))
        self._inputs.fill("sampled_positions", self._padded(plan.kv_lengths, padding, 1))
        bucket.forward.replay()

    def close(self) -> None:
        """Drop the graphs and their memory. Idempotent."""
        self._buckets = {}
        self._sizes = ()

    def _captured(self, rows: int, pool: Any, stream: torch.cuda.Stream) -> Bucket:
        inputs = self._inputs
        nothing = np.zeros(0, dtype=np.int32)
        inputs.begin()
        self._update(nothing, nothing, np.zeros(1, dtype=np.int32), nothing, rows)
        slots = inputs.fill("slots", np.full(rows, self._padding_slot))
        positions = inputs.fill("sampled_positions", np.ones(rows, dtype=np.int64))
        inputs.end()
        torch.cuda.current_stream(inputs.device).synchronize()
        samples = inputs[SAMPLES][: VALUES_PER_SAMPLE * rows]
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                logits = self._forward(inputs["slot_tokens"][slots], slots)
                for groups_of in self._kinds.values():
                    self._sample(logits, slots, positions, groups_of(rows))
                token_logprobs(logits, samples[:rows], CAPTURED_ALTERNATIVES)
            del logits
        stream.synchronize()

        def captured(body: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                out = body()
            return graph, out

        def drawn(groups_of: GroupsOf) -> torch.Tensor:
            return samples.copy_(self._sample(logits, slots, positions, groups_of(rows)).packed())

        def scores() -> torch.Tensor:
            found = token_logprobs(logits, samples[:rows], CAPTURED_ALTERNATIVES)
            return torch.cat((samples, found.packed().flatten()))

        forward, logits = captured(lambda: self._forward(inputs["slot_tokens"][slots], slots))
        sample = {kind: captured(partial(drawn, groups_of))[0] for kind, groups_of in self._kinds.items()}
        score, scored = captured(scores)
        for owner in self._owners.values():
            assert isinstance(owner, CapturedOwner)
            owner.note_capture()
        return Bucket(rows, forward, logits, sample, samples, score, scored)

    def _update(
        self,
        query_lengths: np.ndarray,
        kv_lengths: np.ndarray,
        page_indptr: np.ndarray,
        page_indices: np.ndarray,
        padding: int,
    ) -> None:
        """Update every owner to these rows and `padding` rows of one token behind them."""
        if padding:
            indptr = np.arange(page_indptr[-1] + 1, page_indptr[-1] + 1 + padding, dtype=np.int32)
            page_indptr = np.concatenate((page_indptr, indptr))
            page_indices = self._padded(page_indices, padding, self._padding_page)
            query_lengths, kv_lengths = self._padded(query_lengths, padding, 1), self._padded(kv_lengths, padding, 1)
        for attention, owner in self._owners.items():
            owner.update(
                StepBatch(
                    query_lengths=query_lengths,
                    kv_lengths=kv_lengths,
                    page_indptr=page_indptr,
                    page_indices=page_indices,
                    decode_rows=len(query_lengths),
                    query_heads=attention.query_heads,
                    kv_heads=attention.kv_heads,
                )
            )

    @staticmethod
    def _padded(values: np.ndarray, padding: int, value: int) -> np.ndarray:
        return np.concatenate((values, np.full(padding, value, dtype=values.dtype))) if padding else values
