"""How much scratch the reference attention takes. Free of torch: the planner asks without it."""

from trivet.capacity import PlanCapacity
from trivet.dtypes import item_bytes

INDEX_BYTES = item_bytes("int64")

BLOCK_BYTES = 32 * 2**20
"""Scratch that one block may take; a block holds at least one item, however large."""


def item_scratch_bytes(capacity: PlanCapacity, dtype: str, height: int, extent: int) -> int:
    """Temporaries of one work item: gathered and widened queries, keys and values, scores and their copies."""
    width = item_bytes(dtype) + 4
    queries = 3 * height * capacity.attention.query_elements * width
    keys_and_values = 2 * extent * capacity.attention.kv_elements * width
    scores = 3 * height * capacity.query_heads * extent * 4
    return queries + keys_and_values + scores + 2 * index_bytes(capacity, dtype, height, extent)


def index_bytes(capacity: PlanCapacity, dtype: str, height: int, extent: int) -> int:
    """Index tensors of one work item: its queries' tokens, its keys' slots, and the bias between them."""
    rows = height * capacity.attention.group_size
    return rows * extent * item_bytes(dtype) + height * extent * 2 + 3 * (height + extent) * INDEX_BYTES


def scratch_bytes(capacity: PlanCapacity, dtype: str) -> int:
    """Bound on the temporaries of one attention call: one block, what is kept for the step, and the accumulators."""
    tallest = min(capacity.tile.query_tokens, capacity.tokens, capacity.positions)
    extent = min(capacity.tile.kv_tokens, capacity.positions)
    heights = range(1, tallest + 1)
    one_item = item_scratch_bytes(capacity, dtype, tallest, extent)
    blocks = (_most_items(capacity, h) * item_scratch_bytes(capacity, dtype, h, extent) for h in heights)
    block = min(max(one_item, BLOCK_BYTES), max(blocks))
    # rows of one token and taller ones are indexed apart
    indices = [_most_items(capacity, h) * index_bytes(capacity, dtype, h, extent) for h in heights]
    kept = min(BLOCK_BYTES, capacity.kv_tiles * (indices[0] + max(indices))) + capacity.tokens * INDEX_BYTES
    partial_results = 4 if capacity.kv_tiles > 1 else 2
    accumulators = partial_results * capacity.tokens * capacity.query_heads * (capacity.head_dim + 2) * 4
    return block + kept + accumulators


def _most_items(capacity: PlanCapacity, height: int) -> int:
    """Work items of one KV tile that can lie in a block as high as `height`: the others have two tokens at least."""
    if height == 1:
        return capacity.query_tiles
    return min(capacity.query_tiles, 1 + (capacity.tokens - height) // 2)
