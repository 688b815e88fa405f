"""A FlashInfer plan without FlashInfer: kernels in torch that read what the owner wrote, for machines without a GPU."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from trivet.attention.flashinfer.bounds import Workspace
from trivet.attention.flashinfer.kinds import DecodeKernel
from trivet.attention.flashinfer.owner import FlashInferOwner
from trivet.attention.flashinfer.paths import FlashInferPath
from trivet.attention.flashinfer.protocol import DeviceRows, HostRows, Kernels, PlanSpaces, RowPlan
from trivet.capacity import DeviceProfile, Limits, PlanCapacity
from trivet.geometry import AttentionGeometry
from trivet.layout import BufferLayout, Buffers

H200 = DeviceProfile.named("h200")


def flashinfer_capacity(
    attention: AttentionGeometry,
    limits: Limits,
    path: FlashInferPath,
    device: DeviceProfile = H200,
    dtype: str = "bfloat16",
) -> PlanCapacity:
    """The capacity that a runtime would make for `path`."""
    return PlanCapacity(attention, limits, path.tile(attention), device=device, dtype=dtype)


def unpinned(layout: BufferLayout) -> Buffers:
    """Buffers of `layout` on the CPU; page-locked memory needs a CUDA device."""
    specs = tuple(attrs.evolve(spec, pinned=False) for spec in layout.specs)
    return BufferLayout(layout.name, specs).allocate("cpu")


class NoFence:
    """A fence of a device that does everything at once; counts what is asked of it."""

    def __init__(self) -> None:
        self.recorded = 0
        self.waits: list[int] = []

    def record(self) -> None:
        """One more point."""
        self.recorded += 1

    def synchronize(self) -> None:
        """Note after how many points."""
        self.waits.append(self.recorded)


class TorchRowKernel:
    """Plans nothing, and attends by reading the index arrays.

    Attributes:
        key: what the next plan's key is.
        asked: what planning takes.
        served: numbers of rows that were planned, in order.
    """

    def __init__(self) -> None:
        self.key = (1, 2, 3)
        self.asked: Workspace | None = Workspace(0, 0)
        self.served: list[int] = []

    def plan(self, rows: HostRows, spaces: PlanSpaces) -> RowPlan:
        """Note how many rows there are."""
        assert len(spaces.staged) >= len(spaces.ints)
        assert int(rows.query_indptr[-1]) == rows.tokens
        self.served.append(rows.rows)
        return RowPlan(None, self.key)

    def asks(self, rows: HostRows, spaces: PlanSpaces) -> Workspace | None:
        """As set."""
        return self.asked

    def run(
        self,
        plan: RowPlan,
        rows: DeviceRows,
        spaces: PlanSpaces,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
    ) -> None:
        """Causal attention in float64, row by row."""
        page_size = keys.shape[1]
        group = query.shape[1] // keys.shape[2]
        for row in range(len(rows.last_page_len)):
            first, last = int(rows.query_indptr[row]), int(rows.query_indptr[row + 1])
            held = rows.page_indices[rows.page_indptr[row] : rows.page_indptr[row + 1]].long()
            length = (len(held) - 1) * page_size + int(rows.last_page_len[row])
            key, value = (
                cache[held].flatten(0, 1)[:length].double().repeat_interleave(group, 1).transpose(0, 1)
                for cache in (keys, values)
            )
            scores = query[first:last].double().transpose(0, 1) @ key.transpose(1, 2) / query.shape[-1] ** 0.5
            hidden = torch.arange(length)[None] > torch.arange(length - (last - first), length)[:, None]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[first:last] = (weights @ value).transpose(0, 1).to(out.dtype)


class TorchDecodeKernel(TorchRowKernel):
    """Takes one token of every row, as the library's decode kernel does."""

    def run(
        self,
        plan: RowPlan,
        rows: DeviceRows,
        spaces: PlanSpaces,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
    ) -> None:
        """As the general kernel with rows of one token."""
        single = attrs.evolve(rows, query_indptr=torch.arange(len(query) + 1))
        super().run(plan, single, spaces, query, keys, values, out)


def torch_append(
    key: Tensor, value: Tensor, batch_indices: Tensor, positions: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows
) -> None:
    """Write each token to its page."""
    page_size = keys.shape[1]
    entries = rows.page_indptr[batch_indices.long()] + positions // page_size
    pages, places = rows.page_indices[entries.long()].long(), (positions % page_size).long()
    keys[pages, places] = key
    values[pages, places] = value


def torch_owner(
    capacity: PlanCapacity, path: FlashInferPath, buffers: Buffers | None = None, fences: list[NoFence] | None = None
) -> FlashInferOwner:
    """An owner of `path` on kernels in torch."""
    decode = TorchRowKernel() if path.decode is DecodeKernel.PAGED_PREFILL else TorchDecodeKernel()
    least = path.choice(capacity).hopper_from
    kernels = Kernels(decode, TorchRowKernel(), None if least is None else TorchRowKernel(), torch_append)
    made = fences if fences is not None else []

    def fence() -> NoFence:
        made.append(NoFence())
        return made[-1]

    return FlashInferOwner(capacity, buffers or unpinned(path.layout(capacity)), kernels, long_from=least, fence=fence)
