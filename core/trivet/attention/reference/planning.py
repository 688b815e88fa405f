"""Turn a step batch into the contents of the eleven arrays. Host work in numpy, vectorised over rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trivet.attention.batch import StepBatch
from trivet.capacity import PlanCapacity

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int32Array = NDArray[np.int32]


def tiles_per_row(batch: StepBatch, capacity: PlanCapacity) -> tuple[Int32Array, Int32Array]:
    """Query tiles and KV tiles of each row; an empty row has none."""
    query_tiles = -(-batch.query_lengths // capacity.tile.query_tokens)
    kv_tiles = -(-batch.kv_lengths // capacity.tile.kv_tokens)
    kv_tiles[query_tiles == 0] = 0
    return query_tiles, kv_tiles


def plan_arrays(
    batch: StepBatch, capacity: PlanCapacity, query_tiles: Int32Array, kv_tiles: Int32Array
) -> dict[str, Int32Array]:
    """Contents of the eleven arrays for `batch`, each as long as the batch needs.

    Work items are ordered by KV tile, then row, then query tile: a token occurs at most once per KV tile, so that
    partial results of one KV tile can be merged without collisions.

    Args:
        query_tiles, kv_tiles: of `tiles_per_row`.
    """
    query_lengths, kv_lengths = batch.query_lengths, batch.kv_lengths
    counting = np.arange(batch.rows + 1, dtype=np.int32)
    if (query_lengths == 1).all():  # a pure decode step: a token for each row
        q_indptr, batch_indices, positions = counting, counting[:-1], kv_lengths - 1
    else:
        q_indptr = np.zeros(batch.rows + 1, dtype=np.int32)
        np.cumsum(query_lengths, out=q_indptr[1:])
        batch_indices = np.repeat(counting[:-1], query_lengths)
        first_positions = kv_lengths - query_lengths
        positions = np.arange(q_indptr[-1], dtype=np.int32)
        positions += np.repeat(first_positions - q_indptr[:-1], query_lengths)
    if (query_tiles == 1).all() and (kv_tiles == 1).all():
        requests, (query_tiles, kv_tiles) = counting[:-1], np.zeros((2, batch.rows), dtype=np.int32)
    else:
        requests, query_tiles, kv_tiles = _work_items(query_tiles, kv_tiles)
    last_page_len = (kv_lengths - 1) % capacity.limits.page_size + 1
    last_page_len[kv_lengths == 0] = 0
    return {
        "page_indices": batch.page_indices,
        "page_indptr": batch.page_indptr,
        "last_page_len": last_page_len,
        "batch_indices": batch_indices,
        "positions": positions,
        "q_indptr": q_indptr,
        "request_indices": requests,
        "qo_tile_indices": query_tiles,
        "kv_tile_indices": kv_tiles,
        "kv_chunk_size": np.array([capacity.tile.kv_tokens], dtype=np.int32),
        "total_num_rows": q_indptr[-1:],
    }


def _work_items(query_tiles: Int32Array, kv_tiles: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array]:
    requests: list[Int32Array] = []
    queries: list[Int32Array] = []
    keys: list[Int32Array] = []
    for kv_tile in range(int(kv_tiles.max(initial=0))):
        rows = np.flatnonzero(kv_tiles > kv_tile).astype(np.int32)
        counts = query_tiles[rows]
        starts = np.cumsum(counts) - counts
        items = int(counts.sum())
        requests.append(np.repeat(rows, counts))
        queries.append(np.arange(items, dtype=np.int32) - np.repeat(starts, counts).astype(np.int32))
        keys.append(np.full(items, kv_tile, dtype=np.int32))
    if not requests:
        empty = np.zeros(0, dtype=np.int32)
        return empty, empty, empty
    return np.concatenate(requests), np.concatenate(queries), np.concatenate(keys)
