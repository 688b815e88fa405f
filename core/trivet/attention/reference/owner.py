"""The owner of one reference plan."""

from __future__ import annotations

import torch
from attrs import frozen

from trivet.attention.batch import StepBatch, check_batch
from trivet.attention.protocol import Replan
from trivet.attention.reference.blocks import Block, BlockIndex, cut_blocks, index_block
from trivet.attention.reference.kernel import attend_blocks
from trivet.attention.reference.layout import reference_layout
from trivet.attention.reference.planning import plan_arrays, tiles_per_row
from trivet.attention.reference.scratch import BLOCK_BYTES, index_bytes
from trivet.capacity import PlanCapacity
from trivet.errors import CapacityExceeded, ConfigError, RuntimeDown
from trivet.layout import AllocationMeter, Buffers


@frozen(eq=False)
class _Prepared:
    """What the layers of one step share, derived from the eleven arrays: temporaries under the activation line.

    Attributes:
        tokens: tokens that the plan is for.
        slots: int64 ``[tokens]``, cache slot of each token's key and value.
        blocks: the attention work.
        index: where each block's queries and keys lie; None if that is too large to keep between layers.
        one_kv_tile: whether no context is longer than one KV tile.
    """

    tokens: int
    slots: torch.Tensor
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

    @classmethod
    def allocate(
        cls, capacity: PlanCapacity, device: str | torch.device = "cpu", meter: AllocationMeter | None = None
    ) -> ReferenceOwner:
        """An owner with buffers of its own, of the lengths that `reference_layout` states."""
        return cls(capacity, reference_layout(capacity).allocate(device, meter))

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
        arrays = plan_arrays(batch, self.capacity)
        for name, array in arrays.items():
            held = len(self.buffers[name])
            if len(array) > held:
                raise CapacityExceeded(name, len(array), held, "the buffer is shorter than its layout says")
        for name, array in arrays.items():
            self.buffers[name][: len(array)].copy_(torch.from_numpy(array))
        self._lengths = {name: len(array) for name, array in arrays.items()}
        self._prepared = None
        return Replan.REPLANNED

    def append(self, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's keys and values to their pages. See `PlanOwner.append`."""
        prepared = self._prepare(key)
        width = key.shape[-2] * key.shape[-1]
        keys.view(-1, width).index_copy_(0, prepared.slots, key.reshape(-1, width))
        values.view(-1, width).index_copy_(0, prepared.slots, value.reshape(-1, width))

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Causal attention of the step's queries. See `PlanOwner.attend`."""
        prepared = self._prepare(query)
        index = prepared.index or (self._indexed(block, query.dtype) for block in prepared.blocks)
        return attend_blocks(query, keys, values, index, prepared.one_kv_tile)

    def close(self) -> None:
        """Release the buffers. Idempotent."""
        self._closed = True
        self._prepared = None
        self.buffers.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeDown("this plan owner was closed; its buffers are gone")

    def _prepare(self, rows: torch.Tensor) -> _Prepared:
        self._check_open()
        if self._prepared is None:
            host = {name: self.buffers[name][:length].cpu().numpy() for name, length in self._lengths.items()}
            dtype = str(rows.dtype).removeprefix("torch.")
            blocks = cut_blocks(host, self.capacity, dtype)
            kept_bytes = sum(index_bytes(self.capacity, dtype, b.height, b.extent) * (b.last - b.first) for b in blocks)
            self._prepared = _Prepared(
                tokens=int(host["total_num_rows"][0]),
                slots=self._slots_of_tokens(),
                blocks=blocks,
                index=[self._indexed(block, rows.dtype) for block in blocks] if kept_bytes <= BLOCK_BYTES else None,
                one_kv_tile=not host["kv_tile_indices"].any(),
            )
        if rows.shape[0] != self._prepared.tokens:
            raise ConfigError(
                f"attention over {rows.shape[0]} tokens: the plan is for {self._prepared.tokens}; update it first"
            )
        return self._prepared

    def _slots_of_tokens(self) -> torch.Tensor:
        page_size = self.capacity.limits.page_size
        positions = self.positions
        rows = self.buffers["batch_indices"][: len(positions)].long()
        entries = self.buffers["page_indptr"][rows] + positions // page_size
        return self.buffers["page_indices"][entries.long()].long() * page_size + positions % page_size

    def _indexed(self, block: Block, dtype: torch.dtype) -> BlockIndex:
        return index_block(block, self.buffers, self.capacity, dtype)
