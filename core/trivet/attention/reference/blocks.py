"""Cut the work items of a plan into blocks that a few tensor operations compute at once.

A block holds items of one KV tile that are of similar size. Everything here is read off the
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
from trivet.checked import ceil_div

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Int32Array = NDArray[np.int32]
    HostArrays = dict[str, Int32Array]

BLOCK_ELEMENTS = 2**15
"""Elements of keys that a block must save from being padded to be worth its operations."""


@frozen(eq=False)
class WorkItems:
    """The work items of a plan, as the eleven arrays describe them. Host data, int32, one entry for each item.

    Attributes:
        first_tokens: first token of the step that the item computes.
        heights: how many tokens it computes.
        contexts: tokens of its row's context.
        offsets: position of a token, less its place in the step.
        first_pages: where its row's pages start in `page_indices`.
        pages: how many pages its row has.
        first_keys: position of the first key of its KV tile.
        extents: keys of its KV tile that its last query sees.
        page_indices: the pages of all rows.
        tokens: tokens of the step.
    """

    first_tokens: Int32Array
    heights: Int32Array
    contexts: Int32Array
    offsets: Int32Array
    first_pages: Int32Array
    pages: Int32Array
    first_keys: Int32Array
    extents: Int32Array
    page_indices: Int32Array
    tokens: int

    @classmethod
    def read(cls, arrays: HostArrays, capacity: PlanCapacity) -> WorkItems:
        """Work the items out of the arrays."""
        requests, q_indptr, page_indptr = (arrays[name] for name in ("request_indices", "q_indptr", "page_indptr"))
        chunk, tile = int(arrays["kv_chunk_size"][0]), capacity.tile.query_tokens
        first_pages, row_ends = page_indptr[requests], q_indptr[1:][requests]
        pages = page_indptr[1:][requests] - first_pages
        contexts = (pages - 1) * capacity.limits.page_size + arrays["last_page_len"][requests]
        first_tokens = q_indptr[requests] + arrays["qo_tile_indices"] * tile
        heights = np.minimum(row_ends - first_tokens, tile)
        # causal: the last token of a row sees its whole context, the one before it one key less
        offsets = contexts - row_ends
        first_keys = arrays["kv_tile_indices"] * chunk
        seen = offsets + first_tokens + heights - first_keys
        extents = np.minimum(np.maximum(seen, 0), chunk)
        tokens, page_indices = int(arrays["total_num_rows"][0]), arrays["page_indices"]
        return cls(
            first_tokens, heights, contexts, offsets, first_pages, pages, first_keys, extents, page_indices, tokens
        )


@frozen(eq=False)
class Block:
    """Some items of one KV tile.

    Attributes:
        members: int64, ascending, which items.
        height: query tokens of the tallest of them.
        extent: keys that the one which sees furthest sees within its KV tile.
    """

    members: NDArray[np.int64]
    height: int
    extent: int

    @property
    def items(self) -> int:
        """How many items the block has."""
        return len(self.members)


@frozen(eq=False)
class BlockIndex:
    """Where a block's queries and keys lie, as tensors.

    Attributes:
        block: what they are of.
        tokens: int64 ``[items * height]``, token of each query; places past an item's end repeat its last token.
            None if they are the tokens of the whole step in their order.
        kept: int64, the places of `tokens` that are no repeats; None if none of them is.
        targets: int64, the token of each place that is kept.
        slots: int64 ``[items * extent]``, cache slot of each key; places past a row's end repeat its last key, so
            that nothing outside the row's own context is ever read.
        bias: ``[items, 1, group * height, extent]`` (``[items, 1, 1, extent]`` where the height is 1), 0 where a
            query sees a key and -inf elsewhere; None if every query sees every key.
    """

    block: Block
    tokens: torch.Tensor | None
    kept: torch.Tensor | None
    targets: torch.Tensor | None
    slots: torch.Tensor
    bias: torch.Tensor | None


def cut_blocks(items: WorkItems, capacity: PlanCapacity, dtype: str) -> list[Block]:
    """Blocks of the items, KV tile by KV tile.

    What a block gathers and computes is padded to its tallest item and to its furthest seeing one. Decode rows, which
    are one token high, are therefore kept apart from prefill chunks, and items that see much from those that see
    little.
    """
    heights, extents = items.heights, items.extents
    if not len(heights):
        return []
    tall = heights > 1
    changes = (items.first_keys[1:] != items.first_keys[:-1]) | (tall[1:] != tall[:-1])
    run_starts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(heights)]
    blocks: list[Block] = []
    for run_first, run_last in itertools.pairwise(run_starts):
        for members in _alike(np.arange(run_first, run_last), extents, capacity.attention.kv_elements):
            tallest, widest = int(heights[members].max()), int(extents[members].max())
            most = max(1, BLOCK_BYTES // item_scratch_bytes(capacity, dtype, tallest, max(widest, 1)))
            if widest > 0:
                parts = (members[first : first + most] for first in range(0, len(members), most))
                blocks += [Block(part, tallest, widest) for part in parts]
    return blocks


def _alike(run: NDArray[np.int64], extents: Int32Array, kv_elements: int) -> Iterator[NDArray[np.int64]]:
    """Cut `run` where items that see less would be padded by more than a further block costs."""
    seen = extents[run]
    if int(seen.max() - seen.min()) * len(run) * kv_elements <= BLOCK_ELEMENTS:
        yield run
        return
    order = run[np.argsort(-seen, kind="stable")]
    falling = extents[order].astype(np.int64)
    pending = [(0, len(order))]
    while pending:
        first, last = pending.pop()
        # Cut before an item, and it and all after it are padded to that item's extent and no longer to the first's.
        saved = np.arange(last - first, 0, -1) * (falling[first] - falling[first:last])
        cut = int(saved.argmax())
        if int(saved[cut]) * kv_elements > BLOCK_ELEMENTS:
            pending += [(first, first + cut), (first + cut, last)]
        else:
            yield np.sort(order[first:last])


def index_block(block: Block, items: WorkItems, capacity: PlanCapacity, like: torch.Tensor) -> BlockIndex:
    """The index tensors of `block`, on the device and, for the bias, in the dtype of `like`."""
    chosen = block.members
    tokens = items.first_tokens[chosen][:, None].astype(np.int64)
    kept: NDArray[np.int64] | None = None
    if block.height > 1:
        places, heights = np.arange(block.height), items.heights[chosen][:, None]
        tokens = tokens + np.minimum(places, heights - 1)
        kept = np.flatnonzero(places < heights)
    keys = items.first_keys[chosen[0]] + np.arange(block.extent)  # a block lies within one KV tile
    hidden = keys > (items.offsets[chosen][:, None] + tokens)[:, :, None]

    def on_device(values: NDArray[np.int64] | NDArray[np.bool_]) -> torch.Tensor:
        return torch.from_numpy(values).to(like.device)

    slots = on_device(_slots(keys, items, chosen, capacity.limits.page_size))
    bias: torch.Tensor | None = None
    if hidden.any():
        bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        bias.masked_fill_(on_device(hidden), float("-inf"))
        if block.height > 1:
            group = capacity.attention.group_size
            bias = bias[:, None].expand(-1, group, -1, -1).reshape(block.items, group * block.height, block.extent)
        bias = bias.unsqueeze(1)
    flat = tokens.reshape(-1)
    if kept is not None and len(kept) < len(flat):
        return BlockIndex(block, on_device(flat), on_device(kept), on_device(flat[kept]), slots, bias)
    if len(flat) == items.tokens and (flat == np.arange(items.tokens)).all():
        return BlockIndex(block, None, None, None, slots, bias)
    targets = on_device(flat)
    return BlockIndex(block, targets, None, targets, slots, bias)


def _slots(keys: NDArray[np.int64], items: WorkItems, chosen: NDArray[np.int64], page_size: int) -> NDArray[np.int64]:
    """Cache slot of each key of each chosen item, item by item."""
    first_pages, last_pages = items.first_pages[chosen][:, None], items.pages[chosen][:, None] - 1
    contexts = items.contexts[chosen][:, None]
    first_page, skipped = divmod(int(keys[0]), page_size)
    listed = np.arange(first_page, first_page + ceil_div(skipped + len(keys), page_size))
    starts = items.page_indices[first_pages + np.minimum(listed, last_pages)].astype(np.int64) * page_size
    slots = (starts[:, :, None] + np.arange(page_size)).reshape(len(starts), -1)[:, skipped : skipped + len(keys)]
    past = keys >= contexts
    if past.any():
        last = items.page_indices[first_pages + last_pages] * np.int64(page_size) + (contexts - 1) % page_size
        slots = np.where(past, last, slots)
    return slots.reshape(-1)
