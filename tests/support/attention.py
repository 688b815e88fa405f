"""Step batches for plan owners, and full-precision attention to compare with."""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen

from trivet.attention import StepBatch
from trivet.capacity import Limits, PlanCapacity, TileShape
from trivet.config.rope import Rope
from trivet.geometry import AttentionGeometry


def geometry(group: int = 2, kv_heads: int = 2, head_dim: int = 16) -> AttentionGeometry:
    """An attention geometry with a plain rope."""
    return AttentionGeometry(group * kv_heads, kv_heads, head_dim, Rope(theta=1e4, rotary_dim=head_dim))


def batch_of(
    capacity: PlanCapacity, query_lengths: list[int], kv_lengths: list[int], pages: list[list[int]] | None = None
) -> StepBatch:
    """A batch with the given lengths; rows get pages of their own unless `pages` lists them."""
    counts = [-(-length // capacity.limits.page_size) for length in kv_lengths]
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    if pages is None:
        flat = np.arange(indptr[-1], dtype=np.int32)
    else:
        flat = np.concatenate([np.asarray(row, dtype=np.int32) for row in pages] or [np.zeros(0, np.int32)])
    return StepBatch(query_lengths, kv_lengths, indptr, flat, 0, capacity.query_heads, capacity.kv_heads)


def random_capacity(rng: np.random.Generator, group: int | None = None) -> PlanCapacity:
    """A capacity with small random limits and tiles."""
    limits = Limits(
        max_requests=int(rng.integers(1, 6)),
        max_step_tokens=int(rng.integers(1, 80)),
        max_context=int(rng.integers(1, 60)),
        page_size=int(rng.choice([1, 3, 16])),
    )
    tile = TileShape(int(rng.integers(1, 9)), int(rng.choice([5, 16, 64])))
    return PlanCapacity(geometry(group or int(rng.integers(1, 8)), int(rng.integers(1, 3))), limits, tile)


def random_lengths(rng: np.random.Generator, capacity: PlanCapacity) -> tuple[list[int], list[int]]:
    """Query and KV lengths of a batch within `capacity`."""
    rows = int(rng.integers(1, capacity.requests + 1))
    kv_lengths = rng.integers(1, capacity.positions + 1, rows)
    left, query_lengths = capacity.tokens, []
    for length in kv_lengths:
        taken = int(rng.integers(0, min(int(length), left) + 1))
        left -= taken
        query_lengths.append(taken)
    return query_lengths, kv_lengths.tolist()


@frozen(eq=False)
class Contexts:
    """Keys and values of whole contexts, row by row, and the paged cache that holds them."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    cache_keys: torch.Tensor
    cache_values: torch.Tensor

    @classmethod
    def drawn(
        cls, capacity: PlanCapacity, batch: StepBatch, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> Contexts:
        """Random contexts. Only what earlier steps wrote is in the cache; everything else there is NaN."""
        page_size, kv_heads, head_dim = capacity.limits.page_size, capacity.kv_heads, capacity.head_dim
        pages = int(batch.page_indices.max(initial=0)) + 2
        cache_keys = torch.full((pages, page_size, kv_heads, head_dim), float("nan"), dtype=dtype)
        cache_values = cache_keys.clone()
        keys, values = [], []
        for row, length in enumerate(batch.kv_lengths.tolist()):
            key = torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype)
            value = torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype)
            held = batch.page_indices[batch.page_indptr[row] : batch.page_indptr[row + 1]]
            for position in range(length - int(batch.query_lengths[row])):
                cache_keys[held[position // page_size], position % page_size] = key[position]
                cache_values[held[position // page_size], position % page_size] = value[position]
            keys.append(key)
            values.append(value)
        return cls(keys, values, cache_keys, cache_values)

    def new(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that this step appends."""
        starts = (batch.kv_lengths - batch.query_lengths).tolist()
        return (
            torch.cat([key[start:] for key, start in zip(self.keys, starts, strict=True)]),
            torch.cat([value[start:] for value, start in zip(self.values, starts, strict=True)]),
        )

    def attended(self, batch: StepBatch, query: torch.Tensor) -> torch.Tensor:
        """Causal attention in float64, row by row."""
        outputs, first = [], 0
        for row, (length, count) in enumerate(
            zip(batch.kv_lengths.tolist(), batch.query_lengths.tolist(), strict=True)
        ):
            group = query.shape[1] // self.keys[row].shape[1]
            rows = query[first : first + count].double().transpose(0, 1)
            keys = self.keys[row].double().repeat_interleave(group, 1).transpose(0, 1)
            values = self.values[row].double().repeat_interleave(group, 1).transpose(0, 1)
            scores = rows @ keys.transpose(1, 2) / query.shape[-1] ** 0.5
            hidden = torch.arange(length)[None] > torch.arange(length - count, length)[:, None]
            outputs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1))
            first += count
        return torch.cat(outputs)
