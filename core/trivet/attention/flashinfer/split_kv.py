# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""A grouped-query decode kernel of ours, in Triton: split KV, any group size, and no planning on the host.

The query heads of one KV head are the rows of a small matrix product, so that a group reads its keys and values once
and tensor cores do the work (the layout of FlashAttention-2, arXiv:2307.08691). Rows are cut into splits
(Flash-Decoding) by their own length, which the kernel reads on the device; whichever program finishes a row's last
split adds up the partial outputs, always in the same way. So a captured graph serves any lengths, and a row's bits
depend on nothing but the row.

It imports Triton, and is itself imported only to bind a plan that runs on it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trivet.attention.flashinfer.bounds import Workspace
from trivet.attention.flashinfer.protocol import DeviceRows, HostRows, PlanSpaces, RowPlan
from trivet.attention.flashinfer.splits import SplitScratch, SplitShape, launch_rows, split_shape
from trivet.capacity import PlanCapacity
from trivet.dtypes import as_torch
from trivet.errors import ConfigError
from trivet.launch import lean

if TYPE_CHECKING:
    from torch import Tensor

LEAST_DOT_ROWS = 16
"""The fewest rows that a tensor-core product takes; smaller groups are padded."""

MERGED_ELEMENTS = 4096
"""Elements of partial outputs that a program loads at a time to merge them: 32 registers a thread with four warps."""
MOST_MERGED = 8
"""Splits that it loads at a time, at most."""

PASSED_ROW: tl.constexpr = tl.constexpr(2**20)
"""More than all splits of a launch."""
NO_SCORE: tl.constexpr = tl.constexpr(-1e30)
"""Below any score, and finite, so that its differences are numbers."""

STRIDE_GRAIN = 8
"""Strides of queries and outputs are multiples of this many elements, so that 16 bytes are loaded at once."""


@triton.jit
def _length(index, live, page_indptr, last_page_len, positions, PAGE_SIZE: tl.constexpr, BY_TOKEN: tl.constexpr):
    """Keys that row `index` attends to; 0 where it is not `live`."""
    if BY_TOKEN:
        length = tl.load(positions + index, mask=live, other=-1) + 1
    else:
        first = tl.load(page_indptr + index, mask=live, other=0)
        pages = tl.load(page_indptr + index + 1, mask=live, other=0) - first
        last = tl.load(last_page_len + index, mask=live, other=0)
        length = tl.where(pages > 0, (pages - 1) * PAGE_SIZE + last, 0)
    return length


@triton.jit
def _split_tokens(length, TILE: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """See `SplitShape.split_tokens`."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, MOST), TILE) * TILE, LEAST)


@lean
@triton.jit(
    do_not_specialize=["rows", "first_row", "query_stride", "query_head_stride", "out_stride"],
    do_not_specialize_on_alignment=["page_indptr", "last_page_len", "page_indices", "token_rows", "positions"],
)
def _split_kv_attention(
    query,
    keys,
    values,
    out,
    partials,
    states,
    counters,
    page_indptr,
    last_page_len,
    page_indices,
    token_rows,
    positions,
    rows,
    first_row,
    query_stride,
    query_head_stride,
    out_stride,
    SCALE: tl.constexpr,  # of scores in base 2
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DOT_ROWS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    SPLITS_HELD: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Any program serves any split of any row and KV head: those of its number, and every ``num_programs``-th on."""
    TOKEN_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    dims = tl.arange(0, HEAD_DIM)
    heads = tl.arange(0, DOT_ROWS)
    merged_heads = tl.arange(0, MERGE_ROWS)
    query_stride = tl.multiple_of(query_stride, 8)
    query_head_stride = tl.multiple_of(query_head_stride, 8)
    out_stride = tl.multiple_of(out_stride, 8)

    if DEPENDENT:
        # Lengths and page lists too may be written by what runs just before.
        gdc_launch_dependents()
        gdc_wait()
    # Every program finds all work by itself: splits of each row, and where each row's splits start.
    indices = tl.arange(0, ROWS_TILE)
    live_rows = indices < rows
    lengths = _length(indices, live_rows, page_indptr, last_page_len, positions, PAGE_SIZE, BY_TOKEN)
    splits_of = tl.maximum(tl.cdiv(lengths, _split_tokens(lengths, TILE, LEAST, MOST)), 1)
    splits_of = tl.where(live_rows, splits_of, 0)
    ends = tl.cumsum(splits_of, 0)
    items = tl.sum(splits_of, 0) * KV_HEADS

    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        # Neighbours differ in the KV head: a token's heads lie side by side in memory.
        nth, head = item // KV_HEADS, item % KV_HEADS
        passed = tl.sum(tl.where(ends <= nth, PASSED_ROW + splits_of, 0), 0)  # rows and their splits, in one sum
        index = passed // PASSED_ROW
        split = nth - passed % PASSED_ROW
        length = _length(index, index < rows, page_indptr, last_page_len, positions, PAGE_SIZE, BY_TOKEN)
        if BY_TOKEN:
            row = tl.load(token_rows + index) - first_row
        else:
            row = index
        pages = page_indices + tl.load(page_indptr + row)
        split_tokens = _split_tokens(length, TILE, LEAST, MOST)
        splits = tl.maximum(tl.cdiv(length, split_tokens), 1)
        first_key = split * split_tokens
        last_key = tl.minimum(first_key + split_tokens, length)

        query_row = query + index.to(tl.int64) * query_stride + head * GROUP * query_head_stride
        queries = tl.load(
            query_row + heads[:, None] * query_head_stride + dims[None, :], mask=heads[:, None] < GROUP, other=0.0
        )
        largest = tl.full([DOT_ROWS], float("-inf"), tl.float32)
        weights = tl.zeros([DOT_ROWS, TILE], tl.float32)
        sums = tl.zeros([DOT_ROWS, HEAD_DIM], tl.float32)
        places = first_key + tl.arange(0, TILE)
        page = tl.load(pages + places // PAGE_SIZE, mask=places < last_key, other=0)
        for start in range(first_key, last_key, TILE):
            places = start + tl.arange(0, TILE)
            live = places < last_key
            # The next tile's pages are looked up a tile ahead, so that loads of keys never wait for a page number.
            ahead = places + TILE
            next_page = tl.load(pages + ahead // PAGE_SIZE, mask=ahead < last_key, other=0)
            slots = (page.to(tl.int64) * PAGE_SIZE + places % PAGE_SIZE) * TOKEN_STRIDE + head * HEAD_DIM
            # Nothing outside the row is loaded: a weight of zero would not silence a NaN.
            key = tl.load(keys + slots[:, None] + dims[None, :], mask=live[:, None], other=0.0)
            value = tl.load(values + slots[:, None] + dims[None, :], mask=live[:, None], other=0.0)
            scores = tl.where(live[None, :], tl.dot(queries, tl.trans(key)) * SCALE, float("-inf"))
            larger = tl.maximum(largest, tl.max(scores, 1))
            fade = tl.exp2(largest - larger)
            shares = tl.exp2(scores - larger[:, None])
            weights = weights * fade[:, None] + shares
            sums = tl.dot(shares.to(value.dtype), value, sums * fade[:, None])
            largest = larger
            page = next_page
        total = tl.sum(weights, 1)

        out_row = out + index.to(tl.int64) * out_stride + head * GROUP * HEAD_DIM
        if splits == 1:
            # An empty row has no weights.
            divided = sums / tl.where(total > 0, total, 1.0)[:, None]
            places_out = out_row + heads[:, None] * HEAD_DIM + dims[None, :]
            tl.store(places_out, divided.to(out.dtype.element_ty), mask=heads[:, None] < GROUP)
        else:
            pair = index * KV_HEADS + head
            held = pair.to(tl.int64) * SPLITS_HELD
            partial = partials + (held + split) * (GROUP * HEAD_DIM)
            state = states + (held + split) * (2 * GROUP)
            tl.store(partial + heads[:, None] * HEAD_DIM + dims[None, :], sums, mask=heads[:, None] < GROUP)
            tl.store(state + heads, largest, mask=heads < GROUP)
            tl.store(state + GROUP + heads, total, mask=heads < GROUP)
            # All threads have stored before one of them says so; whoever is last sees what all others stored.
            tl.debug_barrier()
            arrived = tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu")
            if arrived == splits - 1:
                highest = tl.full([MERGE_ROWS], NO_SCORE, tl.float32)
                whole = tl.zeros([MERGE_ROWS], tl.float32)
                merged = tl.zeros([MERGE_ROWS, HEAD_DIM], tl.float32)
                real = merged_heads < GROUP
                elements = merged_heads[:, None] * HEAD_DIM + dims[None, :]
                for first in range(0, splits, MERGE_SPLITS):
                    for nth_of_some in tl.static_range(MERGE_SPLITS):  # unrolled, so that their loads overlap
                        one = first + nth_of_some
                        stored = real & (one < splits)
                        its_state = states + (held + one) * (2 * GROUP) + merged_heads
                        its_sums = partials + (held + one) * (GROUP * HEAD_DIM) + elements
                        # Past the first-level cache, which may hold what another launch left there.
                        its_largest = tl.load(its_state, mask=stored, other=NO_SCORE, cache_modifier=".cg")
                        its_total = tl.load(its_state + GROUP, mask=stored, other=0.0, cache_modifier=".cg")
                        summed = tl.load(its_sums, mask=stored[:, None], other=0.0, cache_modifier=".cg")
                        higher = tl.maximum(highest, its_largest)
                        fade = tl.exp2(highest - higher)
                        share = tl.exp2(its_largest - higher)
                        whole = whole * fade + its_total * share
                        merged = merged * fade[:, None] + summed * share[:, None]
                        highest = higher
                merged = merged / tl.where(real, whole, 1.0)[:, None]
                tl.store(out_row + elements, merged.to(out.dtype.element_ty), mask=real[:, None])
                tl.store(counters + pair, 0)  # for the next launch


class SplitKv:
    """The split-KV kernel as a `RowKernel`, for decode rows or for every token of a step.

    Expects the counters, which the int workspace holds, to be zero when it is first run; it leaves them so.

    Args:
        capacity: whose rows it serves.
        by_token: serve each token as a row of its own, which attends to its row's keys up to its position: then it
            serves chunks too, in blocks, and a token's bits depend neither on chunking nor on the batch.
        most_rows: it serves no step of more rows; None: any.
        shape: how rows are cut; None: as `split_shape` says. Another shape gives other bits.
    """

    def __init__(
        self,
        capacity: PlanCapacity,
        *,
        by_token: bool,
        most_rows: int | None = None,
        shape: SplitShape | None = None,
    ) -> None:
        assert capacity.device is not None
        attention = capacity.attention
        self._capacity = capacity
        self._shape = shape = shape or split_shape(capacity.head_dim)
        self._by_token = by_token
        self._block = launch_rows(capacity, by_token=by_token, most_rows=most_rows)
        self._programs = capacity.device.multiprocessors * shape.programs_per_multiprocessor
        held = shape.splits_within(capacity.positions)
        self._most_programs_of_a_row = capacity.kv_heads * held
        dependent = shape.dependent and capacity.device.launches_dependent
        merge_rows = triton.next_power_of_2(attention.group_size)
        self._constants = {
            "SCALE": capacity.head_dim**-0.5 * math.log2(math.e),
            "KV_HEADS": capacity.kv_heads,
            "GROUP": attention.group_size,
            "DOT_ROWS": max(LEAST_DOT_ROWS, merge_rows),
            "MERGE_ROWS": merge_rows,
            "MERGE_SPLITS": max(1, min(MOST_MERGED, MERGED_ELEMENTS // (merge_rows * capacity.head_dim))),
            "HEAD_DIM": capacity.head_dim,
            "PAGE_SIZE": capacity.limits.page_size,
            "ROWS_TILE": max(LEAST_DOT_ROWS, triton.next_power_of_2(self._block)),
            "TILE": shape.tile_tokens,
            "LEAST": shape.least_tokens,
            "MOST": shape.most_splits,
            "SPLITS_HELD": held,
            "BY_TOKEN": by_token,
            "DEPENDENT": dependent,
            "launch_pdl": dependent,
            "num_warps": shape.warps,
            "num_stages": shape.stages,
        }

    def plan(self, rows: HostRows, spaces: PlanSpaces) -> RowPlan:
        """Nothing to plan: the number of rows is all that a graph freezes."""
        return RowPlan(rows.rows, (rows.rows,))

    def asks(self, rows: HostRows, spaces: PlanSpaces) -> Workspace | None:
        """See `RowKernel.asks`."""
        scratch = self._scratch(min(rows.tokens, self._block))
        return Workspace(float_bytes=scratch.float_bytes, int_bytes=scratch.int_bytes)

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
        """See `RowKernel.run`.

        Raises:
            ConfigError: a tensor lies in memory in a way that the kernel does not read.
        """
        _check_strides(query, keys, values, out)
        count = len(query)
        scratch = self._scratch(min(count, self._block))
        floats = spaces.floats[: scratch.float_bytes].view(torch.float32)
        counters = spaces.ints[: scratch.int_bytes].view(torch.int32)
        partials, states = floats[: scratch.partials], floats[scratch.partials :]
        with torch.cuda.device_of(query):
            for first in range(0, count, self._block):
                block = slice(first, min(first + self._block, count))
                of_rows = slice(None) if self._by_token else slice(first, None)
                launched = block.stop - block.start
                _split_kv_attention[(min(launched * self._most_programs_of_a_row, self._programs),)](
                    query[block],
                    keys,
                    values,
                    out[block],
                    partials,
                    states,
                    counters,
                    rows.page_indptr[of_rows],
                    rows.last_page_len[of_rows],
                    rows.page_indices,
                    rows.token_rows[block],
                    rows.positions[block],
                    launched,
                    rows.first_row,
                    query.stride(0),
                    query.stride(1),
                    out.stride(0),
                    **self._constants,
                )

    def warm(self, device: torch.device) -> None:
        """Compile the kernel (seconds, once for each machine) and load it on `device`, so that serving never does."""
        capacity, page_size = self._capacity, self._capacity.limits.page_size
        dtype = as_torch(capacity.dtype or "bfloat16")
        query = torch.zeros(1, capacity.query_heads, capacity.head_dim, dtype=dtype, device=device)
        cache = torch.zeros(1, page_size, capacity.kv_heads, capacity.head_dim, dtype=dtype, device=device)
        zeros, ones = (torch.full((2,), value, dtype=torch.int32, device=device) for value in (0, 1))
        scratch = self._scratch(1)
        spaces = PlanSpaces(
            floats=torch.zeros(scratch.float_bytes, dtype=torch.uint8, device=device),
            ints=torch.zeros(scratch.int_bytes, dtype=torch.uint8, device=device),
            staged=torch.zeros(0, dtype=torch.uint8),
        )
        rows = DeviceRows(
            query_indptr=torch.arange(2, dtype=torch.int32, device=device),
            page_indptr=torch.arange(2, dtype=torch.int32, device=device),
            last_page_len=ones[:1],
            page_indices=zeros[:1],
            token_rows=zeros[:1],
            positions=zeros[:1],
            first_row=0,
        )
        self.run(RowPlan(1, (1,)), rows, spaces, query, cache, cache, torch.empty_like(query))

    def _scratch(self, rows: int) -> SplitScratch:
        return SplitScratch.of(self._capacity, rows, self._shape)


def _check_strides(query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    """Refuse what the kernel's address arithmetic does not hold for."""
    if not keys.is_contiguous() or not values.is_contiguous():
        raise ConfigError(
            f"split-KV attention: the layer's cache has strides {keys.stride()} and {values.stride()}, expected "
            "contiguous [pages, page_size, kv_heads, head_dim]"
        )
    tokens, heads, head_dim = query.shape
    grains = [query.stride(0), out.stride(0)] if tokens > 1 else []
    if heads > 1:
        grains.append(query.stride(1))
    packed = query.stride(2) == out.stride(2) == 1 and (heads == 1 or out.stride(1) == head_dim)
    if not packed or any(stride % STRIDE_GRAIN for stride in grains):
        raise ConfigError(
            f"split-KV attention: queries have strides {query.stride()} and outputs {out.stride()}, expected heads of "
            f"adjacent elements at multiples of {STRIDE_GRAIN} elements, and packed outputs"
        )
