"""Step batches for plan owners, and full-precision attention to hold them against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen

from trivet.attention.batch import StepBatch
from trivet.attention.protocol import DecodePath
from trivet.capacity import Limits, PlanCapacity
from trivet.checked import ceil_div
from trivet.geometry import AttentionGeometry

Lengths = tuple[list[int], list[int]]
"""Query lengths and KV lengths of the rows."""


def batch_of(
    capacity: PlanCapacity, query_lengths: Sequence[int], kv_lengths: Sequence[int], pages: Sequence[int] | None = None
) -> StepBatch:
    """A batch of rows of these lengths, on `pages` in order, or on pages that no two rows share."""
    counts = [ceil_div(length, capacity.limits.page_size) for length in kv_lengths]
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return StepBatch(
        query_lengths=np.array(query_lengths),
        kv_lengths=np.array(kv_lengths),
        page_indptr=indptr,
        page_indices=np.arange(indptr[-1]) if pages is None else np.array(pages[: indptr[-1]]),
        decode_rows=0,
        query_heads=capacity.query_heads,
        kv_heads=capacity.kv_heads,
    )


def drawn_capacities(rng: np.random.Generator, path: DecodePath, attention: AttentionGeometry) -> list[PlanCapacity]:
    """Small capacities, and one whose contexts and steps span several of the path's tiles."""
    tile = path.tile(attention)
    drawn = [
        Limits(
            max_requests=int(rng.integers(1, 6)),
            max_step_tokens=int(rng.integers(1, 60)),
            max_context=int(rng.integers(2, 60)),
            page_size=int(rng.choice([1, 3, 16])),
        )
        for _ in range(4)
    ]
    long = Limits(
        max_requests=3,
        max_step_tokens=min(2 * tile.query_tokens + 5, 300),
        max_context=min(2 * tile.kv_tokens + 7, 9000),
        page_size=16,
    )
    return [PlanCapacity(attention, limits, tile) for limits in (*drawn, long)]


def drawn_lengths(rng: np.random.Generator, capacity: PlanCapacity) -> Lengths:
    """Lengths of a batch within `capacity` that computes at least one token."""
    rows = int(rng.integers(1, capacity.requests + 1))
    kv_lengths = [int(length) for length in rng.integers(1, capacity.positions + 1, rows)]
    left = capacity.tokens
    query_lengths = []
    for length in kv_lengths:
        tokens = int(rng.integers(0, min(length, left) + 1))
        left -= tokens
        query_lengths.append(tokens)
    if not any(query_lengths):
        query_lengths[-1] = 1
    return query_lengths, kv_lengths


def worst_lengths(capacity: PlanCapacity) -> list[Lengths]:
    """Batches that between them need all of every dimension: rows, pages, tokens, tiles."""
    context = [capacity.positions] * capacity.requests
    packed, left = [], capacity.tokens
    for _ in range(capacity.requests):
        packed.append(min(left, capacity.positions))
        left -= packed[-1]
    # One token in as many rows as there can be; each further tile's worth of tokens makes one more tile.
    tile = capacity.tile.query_tokens
    rows = min(capacity.requests, capacity.tokens)
    spread = [1] * rows + [0] * (capacity.requests - rows)
    left = capacity.tokens - rows
    for row in range(rows):
        tiles = min(left // tile, (capacity.positions - 1) // tile)
        spread[row] += tiles * tile
        left -= tiles * tile
    return [(packed, context), (spread, context)]


@frozen(eq=False)
class Contexts:
    """Whole contexts, row by row, and a paged cache that holds what earlier steps wrote of them.

    Everything else in the cache is NaN: the free pages, and the tails of pages.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    cache_keys: torch.Tensor
    cache_values: torch.Tensor

    @classmethod
    def drawn(cls, capacity: PlanCapacity, batch: StepBatch, generator: torch.Generator) -> Contexts:
        """Random float32 contexts for `batch`."""
        page_size, kv_heads, head_dim = capacity.limits.page_size, capacity.kv_heads, capacity.head_dim
        pages = int(batch.page_indices.max(initial=0)) + 2
        caches = [torch.full((pages * page_size, kv_heads, head_dim), float("nan")) for _ in range(2)]
        rows: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for row, length in enumerate(batch.kv_lengths.tolist()):
            held = torch.from_numpy(batch.page_indices[batch.page_indptr[row] : batch.page_indptr[row + 1]]).long()
            before = torch.arange(length - int(batch.query_lengths[row]))
            slots = held[before // page_size] * page_size + before % page_size
            for cache, drawn in zip(caches, rows, strict=True):
                entries = torch.randn(length, kv_heads, head_dim, generator=generator)
                cache[slots] = entries[: len(slots)]
                drawn.append(entries)
        shape = (pages, page_size, kv_heads, head_dim)
        return cls(*rows, caches[0].view(shape), caches[1].view(shape))

    def new(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the step appends."""
        starts = (batch.kv_lengths - batch.query_lengths).tolist()
        return (
            torch.cat([key[start:] for key, start in zip(self.keys, starts, strict=True)]),
            torch.cat([value[start:] for value, start in zip(self.values, starts, strict=True)]),
        )

    def attended(self, batch: StepBatch, query: torch.Tensor) -> torch.Tensor:
        """Causal attention of the step in float64, row by row."""
        outputs, first = [], 0
        for row, count in enumerate(batch.query_lengths.tolist()):
            keys, values = self.keys[row].double(), self.values[row].double()
            group = query.shape[1] // keys.shape[1]
            rows = query[first : first + count].double().transpose(0, 1)
            keys = keys.repeat_interleave(group, 1).transpose(0, 1)
            values = values.repeat_interleave(group, 1).transpose(0, 1)
            scores = rows @ keys.transpose(1, 2) / query.shape[-1] ** 0.5
            length = keys.shape[1]
            hidden = torch.arange(length)[None] > torch.arange(length - count, length)[:, None]
            outputs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1))
            first += count
        return torch.cat(outputs)
