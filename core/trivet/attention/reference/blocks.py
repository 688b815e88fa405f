"""Cut the work items of a plan into blocks that a few tensor operations compute at once.

A block is a run of consecutive items of one KV tile and of similar query height. Everything here is read off the
eleven arrays: nothing else says what a step attends to.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from trivet.attention.reference.scratch import BLOCK_BYTES, item_scratch_bytes
from trivet.capacity import PlanCapacity
from trivet.layout import Buffers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    HostArrays = dict[str, NDArray[np.int32]]


@frozen
class Block:
    """Items ``first`` to ``last - 1``.

    Attributes:
        first, last: range of work items.
        height: query tokens of the tallest item.
        extent: keys that the item which sees furthest sees within its KV tile.
    """

    first: int
    last: int
    height: int
    extent: int


@frozen(eq=False)
class BlockIndex:
    """Where a block's queries and keys lie, as tensors.

    Attributes:
        tokens: int64 ``[items, height]``, token of each query; slots past an item's end repeat its last token.
        valid: bool ``[items, height]``, which of them are not repeats; None if all are.
        slots: int64 ``[items * extent]``, cache slot of each key; slots past a row's end repeat its last key, so
            that nothing outside the row's own context is ever read.
        bias: ``[items, 1, group * height, extent]`` (``[items, 1, 1, extent]`` where the height is 1), 0 where a
            query sees a key and -inf elsewhere.
    """

    tokens: torch.Tensor
    valid: torch.Tensor | None
    slots: torch.Tensor
    bias: torch.Tensor


def cut_blocks(arrays: HostArrays, capacity: PlanCapacity, dtype: str) -> list[Block]:
    """Blocks of the plan in `arrays`, in item order.

    Decode rows come first and are one token high, so that they fall into blocks of their own and are not padded to
    the height of a prefill chunk beside them.
    """
    requests, query_tiles, kv_tiles = (
        arrays[name] for name in ("request_indices", "qo_tile_indices", "kv_tile_indices")
    )
    if not len(requests):
        return []
    chunk = int(arrays["kv_chunk_size"][0])
    tile = capacity.tile.query_tokens
    q_indptr = arrays["q_indptr"]
    first_tokens = q_indptr[requests] + query_tiles * tile
    heights = np.minimum(q_indptr[requests + 1] - first_tokens, tile)
    pages = np.diff(arrays["page_indptr"])
    kv_lengths = (pages - 1) * capacity.limits.page_size + arrays["last_page_len"]
    seen = kv_lengths[requests] - q_indptr[requests + 1] + first_tokens + heights
    extents = np.clip(seen - kv_tiles * chunk, 0, chunk)
    kinds = kv_tiles * 2 + (heights > 1)
    run_starts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(requests)]
    blocks: list[Block] = []
    for run_first, run_last in itertools.pairwise(run_starts):
        tallest, widest = int(heights[run_first:run_last].max()), int(extents[run_first:run_last].max())
        items = max(1, BLOCK_BYTES // item_scratch_bytes(capacity, dtype, tallest, max(widest, 1)))
        for first in range(run_first, run_last, items):
            last = min(first + items, run_last)
            block = Block(first, last, int(heights[first:last].max()), int(extents[first:last].max()))
            if block.extent > 0:
                blocks.append(block)
    return blocks


def index_block(block: Block, buffers: Buffers, capacity: PlanCapacity, dtype: torch.dtype) -> BlockIndex:
    """The index tensors of `block`, computed on the device of `buffers` from the eleven arrays."""
    page_size = capacity.limits.page_size
    items = slice(block.first, block.last)
    requests = buffers["request_indices"][items].long()
    device = requests.device
    first_tokens = buffers["q_indptr"][requests] + buffers["qo_tile_indices"][items] * capacity.tile.query_tokens
    last_tokens = buffers["q_indptr"][requests + 1] - 1
    steps = torch.arange(block.height, device=device)
    tokens = torch.minimum(first_tokens[:, None] + steps, last_tokens[:, None]).long()
    valid = None if block.height == 1 else first_tokens[:, None] + steps <= last_tokens[:, None]

    page_starts, page_ends = buffers["page_indptr"][requests], buffers["page_indptr"][requests + 1]
    kv_lengths = (page_ends - page_starts - 1) * page_size + buffers["last_page_len"][requests]
    first_keys = buffers["kv_tile_indices"][items] * buffers["kv_chunk_size"]
    keys = first_keys[:, None] + torch.arange(block.extent, device=device)
    # causal: the last query of a row sees its whole context, the one before it one key less
    own = kv_lengths[:, None] - 1 - last_tokens[:, None] + tokens
    seen = keys[:, None, :] <= own[:, :, None]
    bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(seen.logical_not_(), float("-inf"))
    held = torch.minimum(keys, kv_lengths[:, None] - 1)
    pages = buffers["page_indices"][(page_starts[:, None] + held // page_size).long()].long()
    slots = pages * page_size + held % page_size
    if block.height > 1:
        group = capacity.attention.group_size
        bias = bias[:, None].expand(-1, group, -1, -1).reshape(len(requests), group * block.height, block.extent)
    return BlockIndex(tokens, valid, slots.reshape(-1), bias.unsqueeze(1))
