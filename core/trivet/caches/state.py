"""Recurrent and convolution state of the recurrent layers, by slot, and the snapshots of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from trivet.geometry import ModelGeometry, RecurrentGeometry
from trivet.layout import BufferLayout, Buffers, BufferSpec

if TYPE_CHECKING:
    import torch

PADDING_SLOTS = 1
"""Slots on top of the pool that padding rows write to."""


def state_layout(name: str, geometry: ModelGeometry, slots: int, dtype: str) -> BufferLayout:
    """Buffers for `slots` states: per recurrent layer the state in float32 and the convolution tail in `dtype`."""
    specs = []
    for index in geometry.recurrent_layers:
        layer = geometry.layers[index]
        assert isinstance(layer, RecurrentGeometry)
        specs.append(BufferSpec(f"recurrent.{index}", slots * math.prod(layer.state_shape), "float32"))
        specs.append(BufferSpec(f"tail.{index}", slots * math.prod(layer.tail_shape), dtype))
    return BufferLayout(name, tuple(specs))


def snapshots_within(budget_bytes: int, geometry: ModelGeometry, dtype: str) -> int:
    """How many snapshots `budget_bytes` holds; the bytes of one are read off the layout."""
    one = state_layout("snapshot", geometry, 1, dtype).total_bytes
    return budget_bytes // one if one else 0


class StateCut(NamedTuple):
    """A place inside a row of a step at which its recurrent state is kept.

    Attributes:
        row: row of the step.
        tokens: tokens of the row before the cut: at least one, and not all.
        snapshot: where the state goes.
    """

    row: int
    tokens: int
    snapshot: int


class StateOwner(Protocol):
    """Owns the state of every request slot: cleared or restored before first use, saved by copy."""

    def clear(self, slots: Sequence[int]) -> None:
        """Zero the state of `slots`."""

    def save(self, slot: int, snapshot: int) -> None:
        """Copy the state of `slot` into `snapshot`."""

    def restore(self, snapshot: int, slot: int) -> None:
        """Copy `snapshot` into `slot`; the snapshot stays as it is."""


class StatePool(StateOwner):
    """The state owner over two layouts of the same shape: one for slots, one for snapshots."""

    def __init__(self, geometry: ModelGeometry, slots: Buffers, snapshots: Buffers) -> None:
        self.slots = slots
        self.snapshots = snapshots
        self._slot_views: dict[str, torch.Tensor] = {}
        self._snapshot_views: dict[str, torch.Tensor] = {}
        for index in geometry.recurrent_layers:
            layer = geometry.layers[index]
            assert isinstance(layer, RecurrentGeometry)
            recurrent, tail = f"recurrent.{index}", f"tail.{index}"
            for views, buffers in ((self._slot_views, slots), (self._snapshot_views, snapshots)):
                # Counted by the state: a convolution of one tap has tails of no elements.
                entries = buffers[recurrent].numel() // math.prod(layer.state_shape)
                views[recurrent] = buffers[recurrent].view(entries, *layer.state_shape)
                # Channels lie together, which is how all that reads and writes tails takes them.
                views[tail] = buffers[tail].view(entries, *reversed(layer.tail_shape)).transpose(1, 2)
        # Of one dtype each, so that a CUDA device takes many layers in one kernel.
        self._names = tuple(
            [f"{kind}.{index}" for index in geometry.recurrent_layers] for kind in ("recurrent", "tail")
        )

    @property
    def live_slots(self) -> int:
        """Slots of requests; those of padding rows come behind them."""
        return next(iter(self._slot_views.values())).shape[0] - PADDING_SLOTS

    def recurrent(self, layer: int) -> torch.Tensor:
        """``[slots, value_heads, key_dim, value_dim]``, float32: recurrent state of every slot."""
        return self._slot_views[f"recurrent.{layer}"]

    def tail(self, layer: int) -> torch.Tensor:
        """``[slots, conv_channels, conv_kernel - 1]``: the last inputs of the convolution, oldest first."""
        return self._slot_views[f"tail.{layer}"]

    def kept(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """State and tail of a layer in every snapshot, in the shapes of `recurrent` and `tail`."""
        return self._snapshot_views[f"recurrent.{layer}"], self._snapshot_views[f"tail.{layer}"]

    def clear(self, slots: Sequence[int]) -> None:
        """Zero the state of `slots`."""
        import torch

        for names in self._names if slots else ():
            torch._foreach_zero_([self._slot_views[name][slot] for name in names for slot in slots])

    def save(self, slot: int, snapshot: int) -> None:
        """Copy the state of `slot` into `snapshot`."""
        import torch

        for names in self._names:
            kept = [self._snapshot_views[name][snapshot] for name in names]
            torch._foreach_copy_(kept, [self._slot_views[name][slot] for name in names])

    def restore(self, snapshot: int, slot: int) -> None:
        """Copy `snapshot` into `slot`; the snapshot stays as it is."""
        import torch

        for names in self._names:
            kept = [self._snapshot_views[name][snapshot] for name in names]
            torch._foreach_copy_([self._slot_views[name][slot] for name in names], kept)

    def close(self) -> None:
        """Release slots and snapshots. Idempotent."""
        self._slot_views = {}
        self._snapshot_views = {}
        self.slots.close()
        self.snapshots.close()
