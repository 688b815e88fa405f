"""The owner of one reference plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from trivet.attention.batch import StepBatch, check_batch
from trivet.attention.protocol import Replan
from trivet.attention.reference.blocks import Block, BlockIndex, WorkItems, cut_blocks, index_block
from trivet.attention.reference.kernel import attend_blocks
from trivet.attention.reference.layout import reference_layout
from trivet.attention.reference.planning import plan_arrays, tiles_per_row
from trivet.attention.reference.scratch import BLOCK_BYTES, index_bytes
from trivet.capacity import PlanCapacity
from trivet.errors import CapacityExceeded, ConfigError, RuntimeDown
from trivet.layout import AllocationMeter, Buffers

if TYPE_CHECKING:
    from numpy.typing import NDArray


@frozen(eq=False)
class _Prepared:
    """What the layers of one step share, derived from the eleven arrays: temporaries under the activation line.

    Attributes:
        tokens: tokens that the plan is for.
        slots: int64 ``[tokens]``, cache slot of each token's key and value.
        items: the work items.
        blocks: the attention work.
        index: where each block's queries and keys lie; None if that is too large to keep between layers.
        one_kv_tile: whether no context is longer than one KV tile.
    """

    tokens: int
    slots: torch.Tensor
    items: WorkItems
    blocks: list[Block]
    index: list[BlockIndex] | None
    one_kv_tile: bool


class ReferenceOwner:
    """Holds the eleven arrays, refills them in place, and attends by reading its work from them."""

    def __init__(self, capacity: PlanCapacity, buffers: Buffers) -> None:
        self.capacity = capacity
        self.buffers = buffers
        self._closed = False
        self._lengths: dict[str, int] = {}
        self._prepared: _Prepared | None = None
        # In host memory numpy writes and reads the very buffers, at a tenth of what a tensor copy costs.
        names = [spec.name for spec in buffers.layout.specs if buffers[spec.name].device.type == "cpu"]
        self._views: dict[str, NDArray[np.int32]] = {name: buffers[name].numpy() for name in names}

    @classmethod
    def allocate(
        cls, capacity: PlanCapacity, device: str | torch.device = "cpu", meter: AllocationMeter | None = None
    ) -> ReferenceOwner:
        """An owner with buffers of its own, of the lengths that `reference_layout` states."""
        return cls(capacity, reference_layout(capacity).allocate(device, meter))

    def like(self, buffers: Buffers) -> ReferenceOwner:
        """A like owner over other `buffers` of the same layout."""
        return ReferenceOwner(self.capacity, buffers)

    @property
    def positions(self) -> torch.Tensor:
        """int32 ``[tokens]``: position of each token of the step, in the plan's own buffer."""
        self._check_open()
        return self.buffers["positions"][: self._lengths["positions"]]

    def update(self, batch: StepBatch) -> Replan:
        """Refill the eleven arrays in place. See `PlanOwner.update`; on an error nothing has been written."""
        self._check_open()
        query_tiles, kv_tiles = tiles_per_row(batch, self.capacity)
        check_batch(batch, self.capacity, int(query_tiles @ kv_tiles))
        arrays = plan_arrays(batch, self.capacity, query_tiles, kv_tiles)
        lengths = {name: len(array) for name, array in arrays.items()}
        for name, length in lengths.items():
            held = len(self.buffers[name])
            if length > held:
                raise CapacityExceeded(name, length, held, "the buffer is shorter than its layout says")
        for name, array in arrays.items():
            if self._views:
                self._views[name][: lengths[name]] = array
            else:
                self.buffers[name][: lengths[name]].copy_(torch.from_numpy(array))
        self._lengths = lengths
        self._prepared = None
        return Replan.REPLANNED

    def append(self, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's keys and values to their pages. See `PlanOwner.append`."""
        slots = self._prepare(key).slots
        _, _, heads, head_dim = keys.shape
        keys.view(-1, heads, head_dim).index_copy_(0, slots, key)
        values.view(-1, heads, head_dim).index_copy_(0, slots, value)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Causal attention of the step's queries. See `PlanOwner.attend`."""
        prepared = self._prepare(query)
        index = prepared.index or (
            index_block(block, prepared.items, self.capacity, query) for block in prepared.blocks
        )
        return attend_blocks(query, keys, values, index, prepared.one_kv_tile)

    def close(self) -> None:
        """Release the buffers. Idempotent."""
        self._closed = True
        self._prepared = None
        self._views = {}
        self.buffers.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeDown("this plan owner was closed; its buffers are gone")

    def _prepare(self, rows: torch.Tensor) -> _Prepared:
        self._check_open()
        if self._prepared is None:
            self._prepared = self._read_plan(rows)
        if rows.shape[0] != self._prepared.tokens:
            raise ConfigError(
                f"attention over {rows.shape[0]} tokens: the plan is for {self._prepared.tokens}; update it first"
            )
        return self._prepared

    def _read_plan(self, rows: torch.Tensor) -> _Prepared:
        """Work out what the eleven arrays say, for queries like `rows`."""
        if self._views:
            host = {name: self._views[name][:length] for name, length in self._lengths.items()}
        else:
            host = {name: self.buffers[name][:length].cpu().numpy() for name, length in self._lengths.items()}
        capacity, dtype = self.capacity, str(rows.dtype).removeprefix("torch.")
        items = WorkItems.read(host, capacity)
        blocks = cut_blocks(items, capacity, dtype)
        kept_bytes = sum(index_bytes(capacity, dtype, block.height, block.extent) * block.items for block in blocks)
        keep = kept_bytes <= BLOCK_BYTES
        page_size, positions = capacity.limits.page_size, host["positions"]
        pages = host["page_indices"][host["page_indptr"][host["batch_indices"]] + positions // page_size]
        slots = pages.astype(np.int64) * page_size + positions % page_size
        return _Prepared(
            tokens=items.tokens,
            slots=torch.from_numpy(slots).to(rows.device),
            items=items,
            blocks=blocks,
            index=[index_block(block, items, capacity, rows) for block in blocks] if keep else None,
            one_kv_tile=not host["kv_tile_indices"].any(),
        )
