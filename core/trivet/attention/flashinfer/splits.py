"""How the split-KV kernel cuts a row's keys, and the scratch that this takes, in closed form.

Where a row is cut depends on the row's own length and on nothing else: not on the batch, not on the grid, not on the
device. That is why the kernel needs no plan, and why a row's result is the same bits alone and in any batch.
"""

from __future__ import annotations

from attrs import frozen

from trivet import checked
from trivet.capacity import PlanCapacity
from trivet.checked import ceil_div
from trivet.dtypes import FLOAT32_BYTES, INT32_BYTES

MOST_LAUNCH_ROWS = 256
"""A launch finds its work by a prefix sum over its rows; more rows are served by further launches."""

TOKENS_OF_A_BLOCK = 64
"""Tokens of chunks that one launch serves at least, where a chunk's tokens are served as rows of their own."""


@frozen
class SplitShape:
    """How rows are cut, and what one program of the kernel is made of.

    Attributes:
        tile_tokens: keys that are loaded and multiplied at a time; a power of two.
        least_tokens: keys of a split, at least; a multiple of `tile_tokens`.
        most_splits: splits of a row, at most; a longer row has longer splits.
        warps: warps of a program.
        stages: tiles in flight, as Triton counts them.
        programs_per_multiprocessor: the grid has at most this many programs for each multiprocessor; each takes
            splits in turn. It moves no bit.
        dependent: whether the kernel is launched while the one before it in the stream still runs, where the device
            can do that, and waits on the device for what that one writes. It moves no bit either.
    """

    tile_tokens: int
    least_tokens: int
    most_splits: int
    warps: int
    stages: int
    programs_per_multiprocessor: int
    dependent: bool = False

    def split_tokens(self, length: int) -> int:
        """Keys of each split, but for the last, of a row of `length` keys."""
        even = ceil_div(ceil_div(length, self.most_splits), self.tile_tokens) * self.tile_tokens
        return max(self.least_tokens, even)

    def splits_within(self, positions: int) -> int:
        """The most splits of any row of up to `positions` keys."""
        return min(self.most_splits, ceil_div(positions, self.least_tokens))


def split_shape(head_dim: int) -> SplitShape:
    """The shape that serves `head_dim`."""
    if head_dim <= 64:
        return SplitShape(64, 128, 32, warps=4, stages=4, programs_per_multiprocessor=4)
    if head_dim <= 128:
        return SplitShape(64, 256, 32, warps=4, stages=3, programs_per_multiprocessor=3)
    return SplitShape(32, 128, 64, warps=4, stages=3, programs_per_multiprocessor=2)


def launch_rows(capacity: PlanCapacity, *, by_token: bool, most_rows: int | None = None) -> int:
    """Rows that one launch serves at most.

    Args:
        by_token: every token of the step is served as a row, those of chunks too.
        most_rows: it serves no step of more rows; None: any.
    """
    rows = min(capacity.requests, capacity.tokens)
    if by_token:
        rows = min(capacity.tokens, max(rows, TOKENS_OF_A_BLOCK))
    return min(rows, MOST_LAUNCH_ROWS if most_rows is None else most_rows)


@frozen
class SplitScratch:
    """Scratch of one launch, float32 and int32 elements.

    Attributes:
        partials: weighted sums of values, ``[rows, kv_heads, splits, group, head_dim]``.
        states: largest score and sum of weights, ``[rows, kv_heads, splits, 2, group]``.
        counters: splits that have arrived, ``[rows, kv_heads]``; zero between launches.
    """

    partials: int
    states: int
    counters: int

    @classmethod
    def of(cls, capacity: PlanCapacity, rows: int, shape: SplitShape) -> SplitScratch:
        """Scratch of a launch of `rows` rows.

        Raises:
            CapacityExceeded: an element count does not fit the kernel's arithmetic.
        """
        pairs = rows * capacity.kv_heads
        heads = pairs * shape.splits_within(capacity.positions) * capacity.attention.group_size
        return cls(
            partials=checked.int64("partial outputs of split rows", heads * capacity.head_dim),
            states=checked.int32("states of split rows", heads * 2),
            counters=checked.int32("pairs of rows and KV heads", pairs),
        )

    @property
    def float_bytes(self) -> int:
        """Bytes of partial outputs and states, which lie one after the other."""
        return (self.partials + self.states) * FLOAT32_BYTES

    @property
    def int_bytes(self) -> int:
        """Bytes of the counters."""
        return self.counters * INT32_BYTES
