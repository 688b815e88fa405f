"""The reference backend attends correctly, whatever else lies in the cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.attention import Contexts, batch_of, geometry, random_capacity, random_lengths

from trivet.attention.reference.owner import ReferenceOwner
from trivet.capacity import Limits, PlanCapacity, TileShape


@pytest.mark.parametrize("group", range(1, 9))
def test_equals_float64_attention_for_every_group_size_mix_of_rows_and_tile(group: int) -> None:
    rng, generator = np.random.default_rng(group), torch.Generator().manual_seed(group)
    for _ in range(12):
        capacity = random_capacity(rng, group)
        lengths = random_lengths(rng, capacity)
        if not sum(lengths[0]):
            continue
        owner = ReferenceOwner.allocate(capacity)
        batch = batch_of(capacity, *lengths)
        contexts = Contexts.drawn(capacity, batch, generator)
        query = torch.randn(batch.tokens, capacity.query_heads, capacity.head_dim, generator=generator)
        owner.update(batch)
        owner.append(*contexts.new(batch), contexts.cache_keys, contexts.cache_values)
        attended = owner.attend(query, contexts.cache_keys, contexts.cache_values)
        torch.testing.assert_close(attended.double(), contexts.attended(batch, query), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_tokens", [16, 4096])
def test_half_precision_accumulates_in_float32(dtype: torch.dtype, kv_tokens: int) -> None:
    capacity = PlanCapacity(geometry(5, 1, 64), Limits(2, 8, 600, 16), TileShape(64, kv_tokens))
    generator = torch.Generator().manual_seed(0)
    batch = batch_of(capacity, [1, 3], [600, 411])
    contexts = Contexts.drawn(capacity, batch, generator, dtype)
    query = torch.randn(4, 5, 64, generator=generator).to(dtype)
    owner = ReferenceOwner.allocate(capacity)
    owner.update(batch)
    owner.append(*contexts.new(batch), contexts.cache_keys, contexts.cache_values)
    attended = owner.attend(query, contexts.cache_keys, contexts.cache_values)
    torch.testing.assert_close(attended.double(), contexts.attended(batch, query), atol=4e-3, rtol=2e-2)


def test_work_too_large_to_index_at_once_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = PlanCapacity(geometry(2), Limits(4, 64, 90, 3), TileShape(4, 32))
    generator = torch.Generator().manual_seed(1)
    batch = batch_of(capacity, [1, 1, 40, 20], [90, 17, 66, 20])
    contexts = Contexts.drawn(capacity, batch, generator)
    query = torch.randn(batch.tokens, capacity.query_heads, capacity.head_dim, generator=generator)
    results = []
    for block_bytes in (2**30, 1):
        monkeypatch.setattr("trivet.attention.reference.blocks.BLOCK_BYTES", block_bytes)
        monkeypatch.setattr("trivet.attention.reference.owner.BLOCK_BYTES", block_bytes)
        owner = ReferenceOwner.allocate(capacity)
        owner.update(batch)
        owner.append(*contexts.new(batch), contexts.cache_keys, contexts.cache_values)
        results.append(owner.attend(query, contexts.cache_keys, contexts.cache_values))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-6)


def test_corrupting_any_array_changes_the_output_or_raises() -> None:
    capacity = PlanCapacity(geometry(2), Limits(3, 32, 40, 4), TileShape(4, 16))
    generator = torch.Generator().manual_seed(2)
    batch = batch_of(capacity, [1, 9, 6], [33, 21, 6])
    query = torch.randn(batch.tokens, capacity.query_heads, capacity.head_dim, generator=generator)
    contexts = Contexts.drawn(capacity, batch, generator)
    keys, values = contexts.cache_keys.nan_to_num(7.0), contexts.cache_values.nan_to_num(7.0)

    def attended(corrupt: str | None) -> torch.Tensor:
        owner = ReferenceOwner.allocate(capacity)
        owner.update(batch)
        if corrupt is not None:
            array = owner.buffers[corrupt]
            index = {"page_indptr": 1, "q_indptr": 1}.get(corrupt, 0)
            array[index] += 1
        own_keys, own_values = keys.clone(), values.clone()
        owner.append(*contexts.new(batch), own_keys, own_values)
        return owner.attend(query, own_keys, own_values)

    clean = attended(None)
    for name in owner_arrays():
        try:
            corrupted = attended(name)
        except Exception:
            continue
        assert not torch.equal(clean, corrupted), f"{name} was corrupted and nothing changed"


def owner_arrays() -> list[str]:
    capacity = PlanCapacity(geometry(), Limits(1, 1, 1, 1), TileShape(1, 1))
    names = list(ReferenceOwner.allocate(capacity).buffers.pointers())
    assert len(names) == 11
    return names
