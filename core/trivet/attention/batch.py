"""One step as the planner sees it: which rows, how long, on which pages. Host data only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import field, frozen

from trivet.capacity import PlanCapacity
from trivet.errors import CapacityExceeded, ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _int32(values: object) -> NDArray[np.int32]:
    return np.ascontiguousarray(values, dtype=np.int32)


@frozen(eq=False)
class StepBatch:
    """Rows of one step, decode rows first.

    Attributes:
        query_lengths: int32 ``[rows]``, tokens that each row computes in this step (0 for an empty row).
        kv_lengths: int32 ``[rows]``, tokens of each row's context once this step has appended.
        page_indptr: int32 ``[rows + 1]``, where each row's pages start in `page_indices`.
        page_indices: int32, the pages of all rows, row by row, ``ceil(kv_length / page_size)`` each.
        decode_rows: how many leading rows are decode rows. Told by kind, never by length: a prefill chunk may
            be one token long.
        query_heads: query heads of the tensors that will be attended.
        kv_heads: KV heads of them.
    """

    query_lengths: NDArray[np.int32] = field(converter=_int32)
    kv_lengths: NDArray[np.int32] = field(converter=_int32)
    page_indptr: NDArray[np.int32] = field(converter=_int32)
    page_indices: NDArray[np.int32] = field(converter=_int32)
    decode_rows: int
    query_heads: int
    kv_heads: int

    def __attrs_post_init__(self) -> None:
        if len(self.query_lengths) != len(self.kv_lengths):
            raise ConfigError(
                f"step batch: {len(self.query_lengths)} query lengths and {len(self.kv_lengths)} KV lengths, expected "
                "one of each for every row"
            )

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return len(self.query_lengths)

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.query_lengths.sum())


def check_batch(batch: StepBatch, capacity: PlanCapacity, tiles: int) -> None:
    """Refuse a batch that is larger than `capacity` in any dimension, before a buffer is touched.

    Args:
        tiles: work items that the kernel's own tiling needs for this batch.

    Raises:
        CapacityExceeded: naming the dimension: requests, indptr, tokens, positions, pages_per_request, pages, tiles,
            query_heads or kv_heads.
        ConfigError: the arrays of the batch contradict each other.
    """
    rows = batch.rows
    _bound("query_heads", batch.query_heads, capacity.query_heads)
    _bound("kv_heads", batch.kv_heads, capacity.kv_heads)
    _bound("requests", rows, capacity.requests)
    _bound("indptr", len(batch.page_indptr), capacity.indptr)
    _bound("tokens", batch.tokens, capacity.tokens)
    if rows:
        _bound("positions", int(batch.kv_lengths.max()), capacity.positions)
        pages_per_row = batch.page_indptr[1:] - batch.page_indptr[:-1]
        _bound("pages_per_request", int(pages_per_row.max()), capacity.pages_per_request)
        _bound("pages", len(batch.page_indices), capacity.pages)
        _consistent(batch, capacity, pages_per_row)
    _bound("tiles", tiles, capacity.tiles)
    if (batch.query_heads, batch.kv_heads) != (capacity.query_heads, capacity.kv_heads):
        raise ConfigError(
            f"step batch: it is for {batch.query_heads}/{batch.kv_heads} heads, the plan is for "
            f"{capacity.query_heads}/{capacity.kv_heads}; each attention geometry has a plan of its own"
        )


def _bound(dimension: str, requested: int, bound: int) -> None:
    if requested > bound:
        raise CapacityExceeded(dimension, requested, bound)


def _consistent(batch: StepBatch, capacity: PlanCapacity, pages_per_row: NDArray[np.int32]) -> None:
    rows = batch.rows
    if len(batch.kv_lengths) != rows or len(batch.page_indptr) != rows + 1:
        raise ConfigError(
            f"step batch: {rows} query lengths, {len(batch.kv_lengths)} KV lengths and "
            f"{len(batch.page_indptr)} page pointers; expected {rows}, {rows} and {rows + 1}"
        )
    if batch.query_lengths.min() < 0 or (batch.query_lengths > batch.kv_lengths).any():
        raise ConfigError("step batch: a row computes more tokens than its context holds, or a negative number")
    expected = -(-batch.kv_lengths // capacity.limits.page_size)
    if (
        batch.page_indptr[0] != 0
        or batch.page_indptr[-1] != len(batch.page_indices)
        or (pages_per_row != expected).any()
    ):
        raise ConfigError(
            f"step batch: the page lists have {pages_per_row.tolist()} pages, contexts of "
            f"{batch.kv_lengths.tolist()} tokens need {expected.tolist()} of {capacity.limits.page_size} tokens"
        )
