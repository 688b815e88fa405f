"""What the layers of one step share. The runtime makes it and passes it down; nothing is read from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trivet.attention import PlanOwner
from trivet.caches.kv import KvCache
from trivet.caches.state import StatePool
from trivet.geometry import AttentionGeometry, ModelGeometry
from trivet.layers.rotary import RotaryTable
from trivet.ops.packed import PackedRows


class StepContext:
    """One step: its rows, their positions, and the caches that its layers read and write.

    Attributes:
        rows: lengths of the rows along the packed token dimension, decode rows first.
        decode_rows: how many leading rows are decode rows.
        slots: int64 ``[rows]``, state slot of each row.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        owners: Mapping[AttentionGeometry, PlanOwner],
        rotary: Mapping[AttentionGeometry, RotaryTable],
        cache: KvCache,
        state: StatePool | None,
        rows: PackedRows,
        decode_rows: int,
        slots: torch.Tensor,
    ) -> None:
        self._geometry = geometry
        self._owners = owners
        self._rotary = rotary
        self._cache = cache
        self._state = state
        self._rotations: dict[AttentionGeometry, tuple[torch.Tensor, torch.Tensor]] = {}
        self.rows = rows
        self.decode_rows = decode_rows
        self.slots = slots

    def rotation(self, attention: AttentionGeometry) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the step's tokens for `attention`, gathered once per step.

        Both are as `trivet.ops.rotary.apply_rotary` takes them, for the plan's own positions.
        """
        rotation = self._rotations.get(attention)
        if rotation is None:
            rotation = self._rotary[attention].at(self._owners[attention].positions)
            self._rotations[attention] = rotation
        return rotation

    def attend(
        self, layer: int, attention: AttentionGeometry, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Append the step's keys and values to the cache of `layer` and attend.

        Args:
            query: ``[tokens, query_heads, head_dim]``, rotated.
            key, value: ``[tokens, kv_heads, head_dim]``, the key rotated.

        Returns:
            ``[tokens, query_heads, head_dim]``.
        """
        owner = self._owners[attention]
        keys, values = self._cache.layer(layer)
        owner.append(key, value, keys, values)
        return owner.attend(query, keys, values)

    def recurrent_state(self, layer: int) -> torch.Tensor:
        """``[slots, value_heads, key_dim, value_dim]``, float32: the state of every slot, to be updated in place."""
        assert self._state is not None
        return self._state.recurrent(layer)

    def conv_tail(self, layer: int) -> torch.Tensor:
        """``[slots, conv_channels, conv_kernel - 1]``: the convolution tails of every slot, updated in place."""
        assert self._state is not None
        return self._state.tail(layer)
