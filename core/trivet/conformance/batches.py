"""Step batches for plan owners, and full-precision attention to hold them against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from trivet.attention.batch import StepBatch
from trivet.attention.protocol import DecodePath
from trivet.capacity import Limits, PlanCapacity
from trivet.checked import ceil_div
from trivet.dtypes import as_torch
from trivet.geometry import AttentionGeometry

if TYPE_CHECKING:
    from trivet.conformance.bench import Bench

Lengths = tuple[list[int], list[int]]
"""Query lengths and KV lengths of the rows."""

NEAR = {"float32": 1e-3, "bfloat16": 2e-2}
"""By dtype, how far attention that is right may be from float64 over the same values, where something else is asked of
it: absolutely, and as much again of the result."""

PAGE_SIZES = {"cpu": (1, 3, 16), "cuda": (1, 16, 64)}
"""By device. Kernel libraries are made for powers of two."""
SMALL_CAPACITIES = {"cpu": 4, "cuda": 2}
"""By device. A kernel may be compiled for each."""


def batch_of(
    capacity: PlanCapacity,
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    pages: Sequence[int] | None = None,
    decode_rows: int = 0,
) -> StepBatch:
    """A batch of rows of these lengths, on `pages` in order, or on pages that no two rows share."""
    counts = [ceil_div(length, capacity.limits.page_size) for length in kv_lengths]
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return StepBatch(
        query_lengths=np.array(query_lengths),
        kv_lengths=np.array(kv_lengths),
        page_indptr=indptr,
        page_indices=np.arange(indptr[-1]) if pages is None else np.array(pages[: indptr[-1]]),
        decode_rows=decode_rows,
        query_heads=capacity.query_heads,
        kv_heads=capacity.kv_heads,
    )


def drawn_capacities(
    rng: np.random.Generator, bench: Bench, path: DecodePath, attention: AttentionGeometry
) -> list[PlanCapacity]:
    """Small capacities for the bench's device, and one whose contexts and steps span several of the path's tiles."""
    tile = path.tile(attention)
    drawn = [
        Limits(
            max_requests=int(rng.integers(1, 6)),
            max_step_tokens=int(rng.integers(1, 60)),
            max_context=int(rng.integers(2, 60)),
            page_size=int(rng.choice(PAGE_SIZES[bench.device])),
        )
        for _ in range(SMALL_CAPACITIES[bench.device])
    ]
    long = Limits(
        max_requests=3,
        max_step_tokens=min(2 * tile.query_tokens + 5, 300),
        max_context=min(2 * tile.kv_tokens + 7, 9000),
        page_size=16,
    )
    return [bench.plan_capacity(path, attention, limits) for limits in (*drawn, long)]


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


def drawn_batch(rng: np.random.Generator, capacity: PlanCapacity) -> StepBatch:
    """A batch as `drawn_lengths` draws it; the first rows of every other one are decode rows, of a token each."""
    query_lengths, kv_lengths = drawn_lengths(rng, capacity)
    decodes = int(rng.integers(0, min(len(query_lengths), capacity.tokens) + 1)) if rng.integers(0, 2) else 0
    left = capacity.tokens - decodes
    for row, tokens in enumerate(query_lengths):
        query_lengths[row] = 1 if row < decodes else min(tokens, left)
        left -= 0 if row < decodes else query_lengths[row]
    return batch_of(capacity, query_lengths, kv_lengths, decode_rows=decodes)


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

    Attributes:
        keys, values: of each row, ``[length, kv_heads, head_dim]`` on the CPU, in the capacity's dtype.
        cache_keys, cache_values: ``[pages, page_size, kv_heads, head_dim]`` on the device.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    cache_keys: torch.Tensor
    cache_values: torch.Tensor

    @classmethod
    def drawn(
        cls, capacity: PlanCapacity, batch: StepBatch, generator: torch.Generator, device: str = "cpu"
    ) -> Contexts:
        """Random contexts for `batch`, the cache on `device`."""
        dtype = as_torch(capacity.dtype or "float32")
        page_size, kv_heads, head_dim = capacity.limits.page_size, capacity.kv_heads, capacity.head_dim
        pages = int(batch.page_indices.max(initial=0)) + 2
        caches = [torch.full((pages * page_size, kv_heads, head_dim), float("nan"), dtype=dtype) for _ in range(2)]
        rows: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for row, length in enumerate(batch.kv_lengths.tolist()):
            held = torch.from_numpy(batch.page_indices[batch.page_indptr[row] : batch.page_indptr[row + 1]]).long()
            before = torch.arange(length - int(batch.query_lengths[row]))
            slots = held[before // page_size] * page_size + before % page_size
            for cache, drawn in zip(caches, rows, strict=True):
                entries = torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype)
                cache[slots] = entries[: len(slots)]
                drawn.append(entries)
        shape = (pages, page_size, kv_heads, head_dim)
        return cls(*rows, *(cache.view(shape).to(device) for cache in caches))

    def new(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the step appends, on the device."""
        starts = (batch.kv_lengths - batch.query_lengths).tolist()
        device = self.cache_keys.device
        return (
            torch.cat([key[start:] for key, start in zip(self.keys, starts, strict=True)]).to(device),
            torch.cat([value[start:] for value, start in zip(self.values, starts, strict=True)]).to(device),
        )

    def query(self, capacity: PlanCapacity, batch: StepBatch, generator: torch.Generator) -> torch.Tensor:
        """Random queries of the step, on the device."""
        drawn = torch.randn(batch.tokens, capacity.query_heads, capacity.head_dim, generator=generator)
        return drawn.to(self.cache_keys)

    def attended(self, batch: StepBatch, query: torch.Tensor) -> torch.Tensor:
        """Causal attention of the step in float64, row by row, on the CPU."""
        outputs, first = [], 0
        query = query.cpu()
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
