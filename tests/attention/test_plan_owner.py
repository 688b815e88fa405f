"""The plan-owner contract on the reference backend: exact lengths, stable pointers, named errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.attention import batch_of, geometry, random_capacity, random_lengths

from trivet.attention.reference.layout import reference_layout
from trivet.attention.reference.owner import ReferenceOwner
from trivet.capacity import Limits, PlanCapacity, TileShape
from trivet.errors import CapacityExceeded, ConfigError, RuntimeDown

DIMENSION_OF = {
    "page_indices": "pages",
    "page_indptr": "indptr",
    "last_page_len": "requests",
    "batch_indices": "tokens",
    "positions": "tokens",
    "q_indptr": "indptr",
    "request_indices": "tiles",
    "qo_tile_indices": "tiles",
    "kv_tile_indices": "tiles",
}

small_capacities = st.builds(
    lambda requests, tokens, context, page, query, keys: PlanCapacity(
        geometry(), Limits(requests, tokens, context, page), TileShape(query, keys)
    ),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 5),
)


def worst_tiling(capacity: PlanCapacity) -> list[int]:
    """Query lengths that need the most query tiles, by trying every way to hand out the tokens."""

    def tiles(lengths: tuple[int, ...]) -> int:
        return sum(-(-n // capacity.tile.query_tokens) for n in lengths)

    best: dict[int, tuple[int, ...]] = {0: ()}
    for _ in range(capacity.requests):
        grown: dict[int, tuple[int, ...]] = {}
        for used, lengths in best.items():
            for n in range(min(capacity.positions, capacity.tokens - used) + 1):
                candidate = (*lengths, n)
                if used + n not in grown or tiles(candidate) > tiles(grown[used + n]):
                    grown[used + n] = candidate
        best = grown
    return list(max(best.values(), key=tiles))


@settings(max_examples=60, deadline=None)
@given(small_capacities)
def test_worst_batches_fill_every_buffer_exactly_to_its_end(capacity: PlanCapacity) -> None:
    full_context = [capacity.positions] * capacity.requests
    most_tokens = [0] * capacity.requests
    for row in range(capacity.requests):
        most_tokens[row] = min(capacity.positions, capacity.tokens - sum(most_tokens))
    worst = {"tiles": worst_tiling(capacity), "tokens": most_tokens}
    for name, dimension in DIMENSION_OF.items():
        query_lengths = worst.get(dimension, most_tokens)
        batch = batch_of(capacity, query_lengths, full_context)
        ReferenceOwner.allocate(capacity).update(batch)
        layout = reference_layout(capacity)
        shorter = layout.with_elements(name, layout.spec(name).elements - 1)
        with pytest.raises(CapacityExceeded, match=name):
            ReferenceOwner(capacity, shorter.allocate("cpu")).update(batch)


@pytest.mark.parametrize("name", ["kv_chunk_size", "total_num_rows"])
def test_one_element_fewer_in_a_scalar_buffer_raises_naming_it(name: str) -> None:
    capacity = random_capacity(np.random.default_rng(0))
    shorter = reference_layout(capacity).with_elements(name, 0)
    with pytest.raises(CapacityExceeded, match=name):
        ReferenceOwner(capacity, shorter.allocate("cpu")).update(batch_of(capacity, [1], [1]))


def test_allocated_bytes_equal_reserved_bytes_buffer_by_buffer() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        capacity = random_capacity(rng)
        layout = reference_layout(capacity)
        buffers = ReferenceOwner.allocate(capacity).buffers
        for spec in layout.specs:
            assert buffers[spec.name].untyped_storage().nbytes() == spec.bytes
        assert buffers.storage_bytes == layout.total_bytes


def test_eleven_pointers_do_not_move_over_a_hundred_random_updates() -> None:
    rng = np.random.default_rng(4)
    capacity = PlanCapacity(geometry(5, 1), Limits(5, 40, 50, 3), TileShape(4, 16))
    owner = ReferenceOwner.allocate(capacity)
    pointers = owner.buffers.pointers()
    assert len(pointers) == 11
    for _ in range(100):
        owner.update(batch_of(capacity, *random_lengths(rng, capacity)))
        assert owner.buffers.pointers() == pointers


CAPACITY = PlanCapacity(geometry(3, 2), Limits(2, 8, 12, 4), TileShape(2, 4))


@pytest.mark.parametrize(
    ("dimension", "query_lengths", "kv_lengths"),
    [("requests", [1, 1, 1], [1, 1, 1]), ("tokens", [5, 4], [5, 4]), ("positions", [1], [13])],
)
def test_one_past_a_dimension_raises_with_its_name(
    dimension: str, query_lengths: list[int], kv_lengths: list[int]
) -> None:
    owner = ReferenceOwner.allocate(CAPACITY)
    owner.update(batch_of(CAPACITY, [2], [7]))
    before = {name: owner.buffers[name].clone() for name in owner.buffers.pointers()}
    with pytest.raises(CapacityExceeded) as raised:
        owner.update(batch_of(CAPACITY, query_lengths, kv_lengths))
    assert raised.value.dimension == dimension
    assert raised.value.requested == raised.value.bound + 1
    assert all(torch.equal(before[name], owner.buffers[name]) for name in before), "a refused update wrote"


@pytest.mark.parametrize(
    ("dimension", "changes"),
    [
        ("query_heads", {"query_heads": 7}),
        ("kv_heads", {"kv_heads": 3}),
        ("pages_per_request", {"page_indptr": [0, 4], "page_indices": [0, 1, 2, 3]}),
        ("pages", {"page_indptr": [0, 3, 6], "page_indices": list(range(7))}),
        ("indptr", {"page_indptr": [0, 3, 6, 6]}),
    ],
)
def test_one_past_a_dimension_of_the_arrays_raises_with_its_name(dimension: str, changes: dict[str, object]) -> None:
    import attrs

    batch = attrs.evolve(batch_of(CAPACITY, [1, 1], [12, 12]), **changes)
    with pytest.raises(CapacityExceeded) as raised:
        ReferenceOwner.allocate(CAPACITY).update(batch)
    assert raised.value.dimension == dimension
    assert raised.value.requested == raised.value.bound + 1


def test_more_tiles_than_the_capacity_raise_with_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = ReferenceOwner.allocate(CAPACITY)
    object.__setattr__(CAPACITY, "tiles", CAPACITY.tiles - 1)
    try:
        with pytest.raises(CapacityExceeded, match="tiles"):
            owner.update(batch_of(CAPACITY, worst_tiling(CAPACITY), [12, 12]))
    finally:
        object.__setattr__(CAPACITY, "tiles", CAPACITY.tiles + 1)


def test_page_lists_that_contradict_the_lengths_are_refused() -> None:
    import attrs

    batch = attrs.evolve(batch_of(CAPACITY, [1], [9]), page_indices=[0, 1], page_indptr=[0, 2])
    with pytest.raises(ConfigError, match="page lists"):
        ReferenceOwner.allocate(CAPACITY).update(batch)


def test_rows_may_list_the_same_page_more_often_than_the_pool_has_pages() -> None:
    owner = ReferenceOwner.allocate(CAPACITY)
    owner.update(batch_of(CAPACITY, [1, 1], [12, 12], pages=[[0, 1, 2], [0, 1, 2]]))
    assert len(set(owner.buffers["page_indices"][:6].tolist())) == 3


def test_attending_a_step_that_was_not_planned_is_refused() -> None:
    owner = ReferenceOwner.allocate(CAPACITY)
    owner.update(batch_of(CAPACITY, [2], [2]))
    cache = torch.zeros(4, 4, 2, 16)
    with pytest.raises(ConfigError, match="update it first"):
        owner.attend(torch.zeros(3, 6, 16), cache, cache)


def test_a_closed_owner_says_so() -> None:
    owner = ReferenceOwner.allocate(CAPACITY)
    owner.close()
    owner.close()
    with pytest.raises(RuntimeDown, match="closed"):
        owner.update(batch_of(CAPACITY, [1], [1]))
