"""What `trivet.plugin` gives to the authors of geometries and plan owners."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

import trivet
from trivet.plugin import (
    AttentionGeometry,
    ModelGeometry,
    PlanCapacity,
    PlanOwner,
    Rope,
    StepBatch,
    TileShape,
    check_batch,
    standard_paths,
)

ATTENTION = AttentionGeometry(4, 2, 16, Rope(theta=1e4, rotary_dim=16))
CAPACITY = PlanCapacity(ATTENTION, trivet.Limits(2, 8, 12, 4), TileShape(64, 2048))
TOO_LARGE = {
    "query_heads": {},
    "kv_heads": {"query_heads": 4},
    "requests": {"kv_heads": 2},
    "indptr": {"query_lengths": [5, 4], "kv_lengths": [13, 13], "page_indptr": [0, 4, 8, 12]},
    "tokens": {"page_indptr": [0, 4, 12]},
    "positions": {"query_lengths": [5, 3]},
    "pages_per_request": {"kv_lengths": [12, 12]},
    "pages": {"page_indptr": [0, 3, 6]},
}
"""What is put right, from one dimension to the next, of a batch that is too large in all of them."""


def batches() -> dict[str, StepBatch]:
    """By dimension, a batch that is too large in it and in those behind it, and in none before it."""
    fields: dict[str, Any] = {
        "query_lengths": [5, 4, 4],
        "kv_lengths": [13, 13, 13],
        "page_indptr": [0, 4, 8, 12],
        "page_indices": range(12),
        "decode_rows": 0,
        "query_heads": 5,
        "kv_heads": 3,
    }
    made = {}
    for dimension, right in TOO_LARGE.items():
        fields |= right
        made[dimension] = StepBatch(**fields)
    return made


@pytest.mark.parametrize("dimension", TOO_LARGE)
def test_a_batch_that_is_too_large_in_several_dimensions_is_refused_for_the_first(dimension: str) -> None:
    with pytest.raises(trivet.CapacityExceeded) as refused:
        check_batch(batches()[dimension], CAPACITY, CAPACITY.tiles + 1)
    assert (refused.value.dimension, refused.value.bound) == (dimension, getattr(CAPACITY, dimension))


def test_arrays_that_contradict_each_other_are_refused_before_tiles_are_counted() -> None:
    fits = attrs.evolve(batches()["pages"], page_indices=range(6))
    contradicts = attrs.evolve(fits, kv_lengths=[12, 8])
    with pytest.raises(trivet.ConfigError, match="page lists"):
        check_batch(contradicts, CAPACITY, CAPACITY.tiles + 1)
    with pytest.raises(trivet.CapacityExceeded) as refused:
        check_batch(fits, CAPACITY, CAPACITY.tiles + 1)
    assert refused.value.dimension == "tiles"
    check_batch(fits, CAPACITY, CAPACITY.tiles)


def test_the_protocol_lists_the_dimensions_in_the_order_in_which_they_are_compared() -> None:
    told = PlanOwner.update.__doc__ or ""
    places = [told.index(f"``{dimension}``") for dimension in (*TOO_LARGE, "tiles")]
    assert places == sorted(places)


def test_a_buffer_that_is_too_short_is_named_by_the_reference_owner() -> None:
    path = standard_paths()[-1]
    capacity = PlanCapacity(ATTENTION, CAPACITY.limits, path.tile(ATTENTION))
    owner = path.bind(capacity, path.layout(capacity).with_elements("page_indices", 5).allocate("cpu"))
    with pytest.raises(trivet.CapacityExceeded) as refused:
        owner.update(attrs.evolve(batches()["pages"], page_indices=range(6)))
    assert (refused.value.dimension, refused.value.requested, refused.value.bound) == ("page_indices", 6, 5)


@pytest.mark.parametrize("eps", [-1e-6, 1.5, float("nan"), float("inf")])
def test_a_geometry_refuses_an_epsilon_that_no_norm_has(eps: float) -> None:
    with pytest.raises(trivet.ConfigError, match=r"epsilon of its norms .*correct rms_norm_eps in config\.json"):
        ModelGeometry(
            model_type="mine",
            hidden_size=8,
            intermediate_size=8,
            vocab_size=8,
            layers=(ATTENTION,),
            norm_eps=eps,
            max_positions=8,
            tied_embeddings=True,
            dtype="float32",
        )
