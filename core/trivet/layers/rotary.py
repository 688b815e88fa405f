"""The rotary table of one attention geometry, in a buffer of its own."""

from __future__ import annotations

import torch

from trivet.config.rope import Rope
from trivet.layout import Buffers
from trivet.ops.rotary import fill_rotary_table, rotary_rows


class RotaryTable:
    """Cosines and sines of every position, computed once at load.

    Args:
        rope: the rotary embedding.
        buffers: allocated from `rotary_layout`.
        dtype: what `at` returns; transformers multiplies queries and keys by cosines in their own dtype.
    """

    def __init__(self, rope: Rope, buffers: Buffers, dtype: torch.dtype) -> None:
        self.buffers = buffers
        self.dtype = dtype
        self.rotary_dim = rope.rotary_dim
        fill_rotary_table(buffers["table"], rope.inverse_frequencies(), rope.attention_scaling)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines at int32 ``positions [tokens]``, as `trivet.ops.rotary.apply_rotary_` takes them."""
        return rotary_rows(self.buffers["table"], positions, self.rotary_dim, self.dtype)
