"""How much workspace FlashInfer's planners take in the worst step of a capacity, in closed form.

The formulas are ours, after `include/flashinfer/attention/scheduler.cuh` of FlashInfer 0.7.4. A planner lays arrays
of one entry per work item into an int workspace, and partial outputs of rows whose KV is split into a float
workspace. How many items there are is bounded by the device's multiprocessors, or by the query tiles of the worst
mix of rows, whichever is more. Binding a plan holds these bounds against what the library itself asks for.
"""

from __future__ import annotations

from attrs import frozen

from trivet.attention.flashinfer.splits import SplitScratch, SplitShape, launch_rows, split_shape
from trivet.capacity import PlanCapacity
from trivet.checked import ceil_div
from trivet.dtypes import FLOAT32_BYTES, INT32_BYTES
from trivet.errors import ConfigError

ALIGNMENT_BYTES = 16

PREFILL_BLOCKS_PER_MULTIPROCESSOR = 2
"""The paged-prefill planner splits KV until it has this many thread blocks for each multiprocessor."""

THREADS_PER_MULTIPROCESSOR = 2048
"""The most that any NVIDIA GPU holds; its registers and shared memory may hold fewer."""

HOPPER_ARRAYS = 7
"""Arrays of one entry per work item in a plan of the Hopper prefill kernel."""

HOPPER_WORK_PER_HEAD = 4096
"""Above this many work items per head, one head's schedule serves all heads."""


@frozen
class Workspace:
    """Bytes of a plan's workspaces.

    Attributes:
        float_bytes: partial outputs and their log-sum-exp, float32.
        int_bytes: the arrays of the plan; its pinned staging takes as much again.
    """

    float_bytes: int
    int_bytes: int


def multiprocessors(capacity: PlanCapacity) -> int:
    """Multiprocessors of the device that `capacity` was made for; `ConfigError` if it names none."""
    if capacity.device is None:
        raise ConfigError("plan capacity: FlashInfer's workspaces depend on the device, and the capacity names none")
    return capacity.device.multiprocessors


def rows_of_a_step(capacity: PlanCapacity) -> int:
    """Rows with at least one token that one step can hold."""
    return min(capacity.requests, capacity.tokens)


def query_tile(group: int) -> int:
    """The smallest query tile of the paged-prefill kernel, in (token, head of the group) pairs."""
    return 16 if group <= 16 else 64 if group <= 64 else 128


def compiled_decode_workspace(capacity: PlanCapacity) -> Workspace:
    """Of the decode kernel: it has ``max(128, head_dim / 8 * group)`` threads or more in a block."""
    group, head_dim = capacity.attention.group_size, capacity.head_dim
    lanes = head_dim // max(8, head_dim // 32)
    blocks = THREADS_PER_MULTIPROCESSOR // max(128, lanes * group) * multiprocessors(capacity)
    split_items = blocks // capacity.kv_heads
    items = max(split_items, rows_of_a_step(capacity))
    return Workspace(
        float_bytes=_partial_bytes(capacity, split_items),
        int_bytes=_stacked(
            items * INT32_BYTES, items * INT32_BYTES, (items + 1) * INT32_BYTES, INT32_BYTES, INT32_BYTES, items
        ),
    )


def prefill_decode_workspace(capacity: PlanCapacity) -> Workspace:
    """Of the paged-prefill kernel over decode rows: every row has one token, and the plan is made for replays."""
    group, rows = capacity.attention.group_size, rows_of_a_step(capacity)
    tile = query_tile(group) if capacity.head_dim < 256 or group <= 16 else 64
    split_items = _split_items(capacity)
    items = max(split_items, rows * ceil_div(group, tile))
    return Workspace(
        float_bytes=_partial_bytes(capacity, ceil_div(split_items * tile, group)),
        int_bytes=_prefill_int_bytes(items, rows, rows),
    )


def prefill_chunks_workspace(capacity: PlanCapacity) -> Workspace:
    """Of the paged-prefill kernel over chunks of any mix of lengths.

    The planner takes a query tile of 16, 64 or 128 pairs by the average row, so that a tile of 16 comes with at most
    17 pairs per row on average and one of 64 with at most 65; at head dim 256 the tile never exceeds 64. Rows
    without tokens count among the rows.
    """
    group, tokens, rows = capacity.attention.group_size, capacity.tokens, capacity.requests
    pairs = tokens * group
    if capacity.head_dim < 256:
        pairs_of_tile = {16: min(pairs, 17 * rows), 64: min(pairs, 65 * rows), 128: pairs}
    else:
        pairs_of_tile = {16: min(pairs, 17 * rows), 64: pairs}
    split_items = _split_items(capacity)
    tiles = max((most + rows * (tile - 1)) // tile for tile, most in pairs_of_tile.items())
    return Workspace(
        float_bytes=_partial_bytes(capacity, ceil_div(split_items * max(pairs_of_tile), group)),
        int_bytes=_prefill_int_bytes(max(split_items, tiles), rows, tokens),
    )


def hopper_chunks_workspace(capacity: PlanCapacity) -> Workspace:
    """Of the Hopper prefill kernel, which cuts queries into tiles of 128 tokens (192 at head dim 64) for each head."""
    tile = 192 if capacity.head_dim == 64 else 128
    tiles = ceil_div(capacity.tokens, tile) + rows_of_a_step(capacity) - 1
    items = max(min(tiles, HOPPER_WORK_PER_HEAD) * capacity.query_heads, tiles)
    arrays = (items * INT32_BYTES,) * HOPPER_ARRAYS
    return Workspace(
        float_bytes=0, int_bytes=_stacked(*arrays[:-1], (multiprocessors(capacity) + 1) * INT32_BYTES, arrays[-1])
    )


def split_kv_workspace(
    capacity: PlanCapacity, *, by_token: bool, most_rows: int | None = None, shape: SplitShape | None = None
) -> Workspace:
    """Of the split-KV kernel: one launch's partial outputs of every split, and a counter for each row and KV head.

    Args:
        by_token: every token of the step is served as a row.
        most_rows: it serves no step of more rows; None: any.
        shape: how rows are cut; None: as `split_shape` says.
    """
    rows = launch_rows(capacity, by_token=by_token, most_rows=most_rows)
    scratch = SplitScratch.of(capacity, rows, shape or split_shape(capacity.head_dim))
    return Workspace(float_bytes=scratch.float_bytes, int_bytes=scratch.int_bytes)


def _split_items(capacity: PlanCapacity) -> int:
    """Work items below which the paged-prefill planner splits KV."""
    return PREFILL_BLOCKS_PER_MULTIPROCESSOR * multiprocessors(capacity) // capacity.kv_heads


def _prefill_int_bytes(items: int, rows: int, tokens: int) -> int:
    return _stacked(
        items * INT32_BYTES,  # row of each item
        items * INT32_BYTES,  # query tile
        items * INT32_BYTES,  # KV tile
        (rows + 1) * INT32_BYTES,  # where each row's outputs start
        INT32_BYTES,  # length of a KV chunk
        INT32_BYTES,  # tokens
        (tokens + 1) * INT32_BYTES,  # where each token's partial outputs start
        items,  # whether an item is work or padding
    )


def _partial_bytes(capacity: PlanCapacity, partial_rows: int) -> int:
    outputs = capacity.query_heads * partial_rows * FLOAT32_BYTES
    return _stacked(outputs * capacity.head_dim, outputs)


def _stacked(*sizes: int) -> int:
    """Bytes of arrays that lie one after the other, each aligned."""
    total = 0
    for size in sizes:
        total = ceil_div(total, ALIGNMENT_BYTES) * ALIGNMENT_BYTES + size
    return total
