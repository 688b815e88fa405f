"""Capacity is computed once, checked in every dimension, and grows with each limit."""

from __future__ import annotations

import json
import pickle
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.attention import geometry

import trivet
from trivet import checked
from trivet.capacity import DeviceProfile, Limits, PlanCapacity, RuntimeCapacity, TileShape, device
from trivet.capacity.chunks import DEVICE_CHUNK_TOKENS
from trivet.capacity.plan import SHORT_PROMPTS
from trivet.errors import CapacityExceeded, ConfigError
from trivet.geometry import ModelGeometry

DIMENSIONS = ("requests", "tokens", "positions", "pages_per_request", "pages", "indptr", "query_tiles", "tiles")

limits = st.builds(Limits, *(st.integers(1, 300) for _ in range(4)))
tiles = st.builds(TileShape, st.integers(1, 100), st.integers(1, 300))


def test_the_limits_of_a_device_change_only_where_they_are_named() -> None:
    own = Limits.for_device("cuda")
    assert Limits.for_device("cuda", max_context=65536) == Limits(
        own.max_requests, own.max_step_tokens, 65536, own.page_size
    )
    assert Limits.for_device("cuda", 1000).max_context == 1000 < own.max_context
    assert Limits.for_device("cuda", 1000, max_context=2000).max_context == 2000
    with pytest.raises(ConfigError, match="'h200': expected one of cpu, cuda"):
        Limits.for_device("h200")


@settings(max_examples=200, deadline=None)
@given(limits, tiles, st.sampled_from(["max_requests", "max_step_tokens", "max_context"]), st.integers(1, 50))
def test_raising_a_limit_lowers_no_dimension(limits: Limits, tile: TileShape, field: str, more: int) -> None:
    import attrs

    before = PlanCapacity(geometry(), limits, tile)
    after = PlanCapacity(geometry(), attrs.evolve(limits, **{field: getattr(limits, field) + more}), tile)
    for dimension in DIMENSIONS:
        assert getattr(after, dimension) >= getattr(before, dimension), dimension


@settings(max_examples=200, deadline=None)
@given(limits)
def test_pages_are_logical(limits: Limits) -> None:
    capacity = PlanCapacity(geometry(), limits, TileShape(64, 2048))
    assert capacity.pages == limits.max_requests * -(-limits.max_context // limits.page_size)


@pytest.mark.parametrize(
    ("dimension", "limits", "tile"),
    [
        ("pages", Limits(2**16, 8, 2**16, 1), TileShape(64, 2048)),
        ("indptr", Limits(2**31 - 1, 8, 1, 1), TileShape(64, 2048)),
        ("tiles", Limits(2**11, 2**31 - 1, 2**20, 2**20), TileShape(1, 1)),
    ],
)
def test_a_dimension_over_int32_is_named(dimension: str, limits: Limits, tile: TileShape) -> None:
    with pytest.raises(CapacityExceeded) as raised:
        PlanCapacity(geometry(), limits, tile)
    assert raised.value.dimension == dimension
    assert raised.value.bound == 2**31 - 1 < raised.value.requested


@pytest.mark.parametrize("value", [0, -1, True, 2.0, None, "4"])
@pytest.mark.parametrize("field", ["max_requests", "max_step_tokens", "max_context", "page_size"])
def test_a_limit_that_is_no_positive_integer_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        Limits(**{field: value})


def test_a_runtime_capacity_hands_out_the_same_plan_objects_it_was_made_with() -> None:
    attention = geometry(5, 1)
    model = ModelGeometry(
        model_type="x",
        hidden_size=8,
        intermediate_size=8,
        vocab_size=16,
        layers=(attention, attention, geometry(2, 1)),
        norm_eps=1e-6,
        max_positions=64,
        tied_embeddings=True,
        dtype="float32",
    )
    capacity = RuntimeCapacity.of(
        model, Limits(), DeviceProfile.named("cpu"), dtype="float32", tile_of=lambda _: TileShape(64, 2048)
    )
    assert len(capacity.plans) == 2, "one plan per distinct attention geometry"
    assert capacity.plan(attention) is capacity.plans[0]
    with pytest.raises(ConfigError, match="3/1x16"):
        capacity.plan(geometry(3, 1))


def test_capacities_are_compared_by_identity() -> None:
    one, other = (PlanCapacity(geometry(), Limits(), TileShape(64, 2048)) for _ in range(2))
    assert one != other


def test_shipped_device_profiles_are_complete_and_memory_can_be_given() -> None:
    shipped = json.loads(resources.files("trivet.capacity").joinpath("profiles.json").read_text())
    assert {"h200", "h100", "a100"} <= set(shipped)
    for name in shipped:
        profile = DeviceProfile.named(name)
        assert profile.kind == "cuda" and profile.multiprocessors > 1 and profile.memory_bytes > 2**33
        assert profile.compute_capability is not None
    assert DeviceProfile.named("H200", 1000).memory_bytes == 1000
    with pytest.raises(ConfigError, match="h200"):
        DeviceProfile.named("h2000")


@pytest.mark.parametrize(("text", "limited"), [("1048576\n", True), ("max\n", False), (f"{2**63 - 4096}", False)])
def test_a_container_has_the_memory_that_it_is_left(
    text: str, limited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CONTAINER_LIMIT_FILES", (tmp_path / "absent",))
    whole = DeviceProfile.named("cpu").memory_bytes
    (tmp_path / "memory.max").write_text(text)
    monkeypatch.setattr(device, "CONTAINER_LIMIT_FILES", (tmp_path / "absent", tmp_path / "memory.max"))
    assert DeviceProfile.named("cpu").memory_bytes == (2**20 if limited else whole)


@pytest.mark.parametrize("value", [-1, 2**31])
def test_int32_names_what_does_not_fit(value: int) -> None:
    with pytest.raises(CapacityExceeded, match="'rows'"):
        checked.int32("rows", value)


def test_a_capacity_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(trivet.CapacityExceeded("pages", 3, 2, "lower it")))
    assert (error.dimension, error.requested, error.bound) == ("pages", 3, 2)
    assert "lower it" in str(error)


def test_a_captured_prompt_is_one_chunk_of_the_recurrent_kernels() -> None:
    # The table of its chunks has room for one (`trivet.runtime.inputs`).
    assert max(SHORT_PROMPTS) <= DEVICE_CHUNK_TOKENS
