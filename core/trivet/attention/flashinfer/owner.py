"""The owner of one FlashInfer plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from trivet.attention.batch import StepBatch, check_batch
from trivet.attention.flashinfer.bounds import query_tile
from trivet.attention.flashinfer.captures import Captures
from trivet.attention.flashinfer.kinds import LongChunks
from trivet.attention.flashinfer.layout import (
    CHUNK_WORKSPACE,
    DECODE_INDPTR,
    DECODE_WORKSPACE,
    FLOAT_WORKSPACE,
    INDEX_ARRAYS,
    SPLIT_COUNTERS,
)
from trivet.attention.flashinfer.protocol import DeviceRows, HostRows, Kernels, PlanSpaces, RowKernel, RowPlan
from trivet.attention.flashinfer.staging import Fence, Staging, StagingSet, StreamFence
from trivet.attention.flashinfer.worst import worst_chunks, worst_decodes
from trivet.attention.places import TokenPlaces
from trivet.attention.protocol import Replan
from trivet.capacity import PlanCapacity
from trivet.checked import INT32_MAX
from trivet.errors import CapacityExceeded, ConfigError, RuntimeDown
from trivet.layout import Buffers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int32Array = NDArray[np.int32]


@frozen(eq=False)
class _Part:
    """Rows of the step that one kernel serves.

    Attributes:
        kernel: the kernel.
        plan: its plan of them.
        rows: their index arrays.
        spaces: where the plan lives.
        first, last: range of their tokens in the step.
    """

    kernel: RowKernel
    plan: RowPlan
    rows: DeviceRows
    spaces: PlanSpaces
    first: int
    last: int


@frozen(eq=False)
class _Step:
    """What `append` and `attend` need of the step that was planned last."""

    tokens: int
    batch_indices: torch.Tensor
    positions: torch.Tensor
    rows: DeviceRows
    parts: tuple[_Part, ...]


class FlashInferOwner:
    """Holds a plan's buffers, refills them in place through pinned staging, and attends on compiled kernels.

    Decode rows, told by `StepBatch.decode_rows`, are planned for CUDA graphs: a captured `append` and `attend` of a
    pure decode step may be replayed after any later `update` to as many rows (see `note_capture`).
    """

    def __init__(
        self,
        capacity: PlanCapacity,
        buffers: Buffers,
        kernels: Kernels,
        *,
        long_from: LongChunks | None = None,
        fence: Callable[[], Fence] | None = None,
        check: bool = True,
    ) -> None:
        """Bind `buffers`, allocated from the layout that `kernels` were chosen with.

        Args:
            long_from: from where on ``kernels.long_chunks`` serves chunks.
            fence: makes a fence; None: in the stream of the buffers' device.
            check: hold the workspaces against what the library asks for; False where the same layout was before.

        Raises:
            CapacityExceeded: a workspace is smaller than what the library asks for in the worst step; named.
        """
        self.capacity = capacity
        self.buffers = buffers
        self._kernels = kernels
        self._long_from = long_from
        self._fence = fence
        self._captures = Captures()
        self._step: _Step | None = None
        self._closed = False
        names = (*INDEX_ARRAYS, DECODE_WORKSPACE, CHUNK_WORKSPACE)
        device = buffers[FLOAT_WORKSPACE].device
        self._staging = Staging(buffers, names, INDEX_ARRAYS, fence or partial(StreamFence, device))
        if DECODE_INDPTR in buffers:
            torch.arange(len(buffers[DECODE_INDPTR]), out=buffers[DECODE_INDPTR])
        for name in (DECODE_WORKSPACE, CHUNK_WORKSPACE, SPLIT_COUNTERS):
            if name in buffers:
                buffers[name].zero_()  # counters start at zero
        self._counting = np.arange(capacity.indptr, dtype=np.int32)
        if check:
            self._check_workspaces()

    def like(self, buffers: Buffers) -> FlashInferOwner:
        """A like owner over other `buffers`, on the kernels that are loaded already: nothing is run or asked for.

        Raises:
            ConfigError: the buffers are of another layout than this owner's, whose workspaces were checked.
        """
        if buffers.layout != self.buffers.layout:
            raise ConfigError(
                f"plan owner: buffers of layout {buffers.layout.name!r} with {buffers.layout.total_bytes} bytes, "
                f"expected the specs of this owner's {self.buffers.layout.name!r} with "
                f"{self.buffers.layout.total_bytes}; bind another layout through its decode path"
            )
        return FlashInferOwner(
            self.capacity, buffers, self._kernels, long_from=self._long_from, fence=self._fence, check=False
        )

    @property
    def positions(self) -> torch.Tensor:
        """int32 ``[tokens]``: position of each token of the step, in the plan's own buffer."""
        return self._planned().positions

    def update(self, batch: StepBatch) -> Replan:
        """Refill the plan in place. See `PlanOwner.update`; past the capacity, nothing has been written.

        Queues copies and plans on the current stream; waits for the device only where it is two updates behind.

        Raises:
            PlanMismatch: the step is planned otherwise than the graph that was captured for it. There is no plan then.
        """
        self._check_open()
        query_lengths, decodes = batch.query_lengths, batch.decode_rows
        group = self.capacity.attention.group_size
        check_batch(batch, self.capacity, int((-(-query_lengths * group // query_tile(group))).sum()))
        if not 0 <= decodes <= batch.rows or (query_lengths[:decodes] != 1).any():
            raise ConfigError(
                f"step batch: {decodes} of {batch.rows} rows are decode rows and compute "
                f"{query_lengths[: max(decodes, 0)].tolist()} tokens, expected exactly 1 each"
            )
        tokens = batch.tokens
        lengths = {
            "page_indices": len(batch.page_indices),
            "page_indptr": batch.rows + 1,
            "last_page_len": batch.rows,
            "chunk_indptr": batch.rows - decodes + 1,
            "batch_indices": tokens,
            "positions": tokens,
        }
        self._check_lengths(lengths, decodes)
        self._step = None
        staged = self._staging.take()
        try:
            _fill(staged.arrays, batch, tokens, self.capacity.limits.page_size, self._counting)
            for name in INDEX_ARRAYS:
                length = lengths[name]
                self.buffers[name][:length].copy_(staged.mirrors[name][:length], non_blocking=True)
            parts = self._plan_parts(batch, staged, tokens)
        finally:
            staged.sent()
        if decodes and decodes == batch.rows:
            self._captures.check(decodes, parts[0].plan.key)
        self._step = _Step(
            tokens=tokens,
            batch_indices=self.buffers["batch_indices"][:tokens],
            positions=self.buffers["positions"][:tokens],
            rows=self._device_rows(slice(0, batch.rows), slice(0, tokens), self.buffers["chunk_indptr"]),
            parts=parts,
        )
        return Replan.REPLANNED

    def append(self, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's keys and values to their pages. See `PlanOwner.append`."""
        step = self._planned_for(key.shape[0])
        _check_addressed(key)
        if step.tokens:
            self._kernels.append(key, value, step.batch_indices, step.positions, keys, values, step.rows)

    def token_places(self, rows: torch.Tensor) -> TokenPlaces:
        """Where the step's tokens go, for kernels that stand in for `append`; `rows` has a row for each token."""
        step = self._planned_for(rows.shape[0])
        return TokenPlaces(step.batch_indices, step.positions, step.rows.page_indptr, step.rows.page_indices)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Causal attention of the step's queries. See `PlanOwner.attend`."""
        step = self._planned_for(query.shape[0])
        _check_addressed(query)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for part in step.parts:
            tokens = slice(part.first, part.last)
            part.kernel.run(part.plan, part.rows, part.spaces, query[tokens], keys, values, out[tokens])
        return out

    def note_capture(self) -> None:
        """Remember that a CUDA graph was captured on the plan in place, for its number of decode rows.

        From now on an `update` to as many decode rows and no chunks raises `PlanMismatch` if it plans otherwise.

        Raises:
            ConfigError: the step in place is not pure decode.
        """
        step = self._planned()
        decode_kernels = (self._kernels.decode, *(kernel for _, kernel in self._kernels.few))
        if len(step.parts) != 1 or step.parts[0].kernel not in decode_kernels:
            raise ConfigError("only pure decode steps are captured: the plan in place has chunks, or no rows")
        self._captures.note(step.tokens, step.parts[0].plan.key)

    def close(self) -> None:
        """Release the buffers, once the device has read the pinned ones. Idempotent."""
        for staged in self._staging.sets:
            staged.wait()
        self._closed = True
        self._step = None
        self._captures.clear()
        self._staging.sets = []
        self.buffers.close()

    def _plan_parts(self, batch: StepBatch, staged: StagingSet, tokens: int) -> tuple[_Part, ...]:
        rows, decodes = batch.rows, batch.decode_rows
        kv_lengths = torch.from_numpy(batch.kv_lengths)
        indptr, parts = staged.mirrors["page_indptr"], []
        if decodes:
            host = HostRows(
                torch.from_numpy(self._counting[: decodes + 1]), indptr[: decodes + 1], kv_lengths[:decodes], decodes
            )
            kernel, spaces = self._kernel_of_decodes(decodes, staged)
            plan = kernel.plan(host, spaces)
            first_tokens = DECODE_INDPTR if DECODE_INDPTR in self.buffers else "chunk_indptr"
            device_rows = self._device_rows(slice(0, decodes), slice(0, decodes), self.buffers[first_tokens])
            parts.append(_Part(kernel, plan, device_rows, spaces, 0, decodes))
        if tokens > decodes:
            chunks = rows - decodes
            host = HostRows(
                staged.mirrors["chunk_indptr"][: chunks + 1],
                indptr[decodes : rows + 1],
                kv_lengths[decodes:],
                tokens - decodes,
            )
            kernel = self._kernel_of_chunks(host)
            spaces = self._spaces(CHUNK_WORKSPACE, staged)
            plan = kernel.plan(host, spaces)
            device_rows = self._device_rows(slice(decodes, rows), slice(decodes, tokens), self.buffers["chunk_indptr"])
            parts.append(_Part(kernel, plan, device_rows, spaces, decodes, tokens))
        return tuple(parts)

    def _kernel_of_decodes(self, decodes: int, staged: StagingSet) -> tuple[RowKernel, PlanSpaces]:
        spaces = self._spaces(DECODE_WORKSPACE, staged)
        for most, kernel in self._kernels.few:
            if decodes <= most:
                return kernel, PlanSpaces(spaces.floats, self.buffers[SPLIT_COUNTERS], spaces.staged)
        return self._kernels.decode, spaces

    def _kernel_of_chunks(self, rows: HostRows) -> RowKernel:
        long_chunks, least = self._kernels.long_chunks, self._long_from
        if long_chunks is not None and least is not None and least.reached(rows.tokens, rows.rows):
            return long_chunks
        return self._kernels.chunks

    def _device_rows(self, rows: slice, tokens: slice, query_indptr: torch.Tensor) -> DeviceRows:
        return DeviceRows(
            query_indptr=query_indptr[: rows.stop - rows.start + 1],
            page_indptr=self.buffers["page_indptr"][rows.start : rows.stop + 1],
            last_page_len=self.buffers["last_page_len"][rows],
            page_indices=self.buffers["page_indices"],
            token_rows=self.buffers["batch_indices"][tokens],
            positions=self.buffers["positions"][tokens],
            first_row=rows.start,
        )

    def _spaces(self, name: str, staged: StagingSet) -> PlanSpaces:
        return PlanSpaces(self.buffers[FLOAT_WORKSPACE], self.buffers[name], staged.mirrors[name])

    def _check_lengths(self, lengths: dict[str, int], decodes: int) -> None:
        """Refuse a step that a buffer is too short for; the capacity was checked, so that its layout is to blame."""
        for name, length in lengths.items():
            for held in (self.buffers[name], *(staging.mirrors[name] for staging in self._staging.sets)):
                if length > len(held):
                    raise CapacityExceeded(name, length, len(held), "the buffer is shorter than its layout says")
        if DECODE_INDPTR in self.buffers and decodes >= len(self.buffers[DECODE_INDPTR]):
            held = self.buffers[DECODE_INDPTR]
            raise CapacityExceeded(DECODE_INDPTR, decodes + 1, len(held), "the buffer is shorter than its layout says")

    def _check_workspaces(self) -> None:
        """Hold the workspaces against what the library asks for in the steps that need most."""
        advice = "a workspace bound is too small for this version of the library"
        page_size = self.capacity.limits.page_size
        for name, kernels, worst in (
            (DECODE_WORKSPACE, (self._kernels.decode,), worst_decodes(self.capacity)),
            (CHUNK_WORKSPACE, (self._kernels.chunks, self._kernels.long_chunks), worst_chunks(self.capacity)),
        ):
            spaces = self._spaces(name, self._staging.sets[0])
            for staging in self._staging.sets:
                if len(staging.mirrors[name]) < len(spaces.ints):
                    raise CapacityExceeded(name, len(spaces.ints), len(staging.mirrors[name]), advice)
            for lengths in worst:
                rows = _host_rows(*lengths, page_size)
                for kernel in kernels:
                    if kernel is not None:
                        self._check_workspace(name, kernel, rows, spaces, advice)
        for most, kernel in self._kernels.few:
            spaces = PlanSpaces(self.buffers[FLOAT_WORKSPACE], self.buffers[SPLIT_COUNTERS], spaces.staged)
            for query_lengths, kv_lengths in worst_decodes(self.capacity):
                fitting = slice(0, min(len(kv_lengths), most))
                rows = _host_rows(query_lengths[fitting], kv_lengths[fitting], page_size)
                self._check_workspace(SPLIT_COUNTERS, kernel, rows, spaces, advice)
        self._staging.sets[0].sent()

    def _check_workspace(self, name: str, kernel: RowKernel, rows: HostRows, spaces: PlanSpaces, advice: str) -> None:
        asked = kernel.asks(rows, spaces)
        if asked is None:  # such a planner raises where its workspace is too small
            kernel.plan(rows, spaces)
            return
        if asked.int_bytes > len(spaces.ints):
            raise CapacityExceeded(name, asked.int_bytes, len(spaces.ints), advice)
        if asked.float_bytes > len(spaces.floats):
            raise CapacityExceeded(FLOAT_WORKSPACE, asked.float_bytes, len(spaces.floats), advice)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeDown("this plan owner was closed; its buffers are gone")

    def _planned(self) -> _Step:
        self._check_open()
        if self._step is None:
            raise ConfigError("this plan owner has no plan in place; update it first")
        return self._step

    def _planned_for(self, tokens: int) -> _Step:
        step = self._planned()
        if tokens != step.tokens:
            raise ConfigError(f"attention over {tokens} tokens: the plan is for {step.tokens}; update it first")
        return step


def _check_addressed(rows: torch.Tensor) -> None:
    """Refuse what FlashInfer's kernels, which take int32 offsets, cannot address: the layout allows for dense rows."""
    elements = rows.shape[0] * rows.stride(0)
    if elements > INT32_MAX:
        raise CapacityExceeded("elements of a step", elements, INT32_MAX, "kernels address a step as int32")


def _fill(arrays: dict[str, Int32Array], batch: StepBatch, tokens: int, page_size: int, counting: Int32Array) -> None:
    """Write the index arrays of `batch` into `arrays`."""
    rows, decodes = batch.rows, batch.decode_rows
    query_lengths, kv_lengths = batch.query_lengths, batch.kv_lengths
    arrays["page_indices"][: len(batch.page_indices)] = batch.page_indices
    arrays["page_indptr"][: rows + 1] = batch.page_indptr
    last = arrays["last_page_len"][:rows]
    np.subtract(kv_lengths, (np.diff(batch.page_indptr) - 1) * page_size, out=last)
    last[kv_lengths == 0] = 0
    arrays["batch_indices"][:decodes] = counting[:decodes]
    np.subtract(kv_lengths[:decodes], 1, out=arrays["positions"][:decodes])
    indptr = arrays["chunk_indptr"][: rows - decodes + 1]
    indptr[0] = 0
    if tokens > decodes:
        lengths = query_lengths[decodes:]
        np.cumsum(lengths, out=indptr[1:])
        arrays["batch_indices"][decodes:tokens] = np.repeat(counting[decodes:rows], lengths)
        starts = np.repeat(kv_lengths[decodes:] - lengths - indptr[:-1], lengths)
        np.add(np.arange(tokens - decodes, dtype=np.int32), starts, out=arrays["positions"][decodes:tokens])
    else:
        indptr[1:] = 0


def _host_rows(query_lengths: Int32Array, kv_lengths: Int32Array, page_size: int) -> HostRows:
    """Rows of those lengths, as a planner reads them."""
    query_indptr, page_indptr = (
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        for lengths in (query_lengths, -(-kv_lengths // page_size))
    )
    return HostRows(
        torch.from_numpy(query_indptr),
        torch.from_numpy(page_indptr),
        torch.from_numpy(kv_lengths),
        int(query_indptr[-1]),
    )
