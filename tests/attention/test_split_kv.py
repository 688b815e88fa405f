"""How the split-KV kernel cuts rows, and the scratch that a plan holds for it: in closed form, and without a GPU."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.attention import geometry
from tests.support.flashinfer import flashinfer_capacity

from trivet.attention.flashinfer.kinds import DecodeKernel
from trivet.attention.flashinfer.paths import FlashInferPath
from trivet.attention.flashinfer.splits import (
    MOST_LAUNCH_ROWS,
    SplitScratch,
    SplitShape,
    launch_rows,
    split_shape,
)
from trivet.capacity import Limits
from trivet.checked import ceil_div
from trivet.errors import CapacityExceeded

TUNED, PINNED = FlashInferPath(DecodeKernel.SPLIT_KV), FlashInferPath(DecodeKernel.SPLIT_KV, pinned=True)
by_head_dim = pytest.mark.parametrize("head_dim", [64, 128, 256])


def splits_of(shape: SplitShape, length: int) -> int:
    """Splits of a row of `length` keys, as the kernel counts them: an empty row has one, which writes zeros."""
    return max(1, ceil_div(length, shape.split_tokens(length)))


@by_head_dim
@given(length=st.integers(0, 2**24), longer=st.integers(0, 2**16))
def test_splits_cover_a_row_without_an_empty_one_and_stay_within_the_bound(
    head_dim: int, length: int, longer: int
) -> None:
    shape = split_shape(head_dim)
    splits, each = splits_of(shape, length), shape.split_tokens(length)
    assert each % shape.tile_tokens == 0
    assert splits * each >= length and (splits - 1) * each < max(length, 1)
    assert splits <= shape.splits_within(length + longer) if length + longer else splits == 1


@by_head_dim
def test_the_bound_of_splits_is_reached(head_dim: int) -> None:
    shape = split_shape(head_dim)
    for positions in (1, shape.least_tokens, shape.least_tokens + 1, 1000, 32768):
        most = max(splits_of(shape, length) for length in range(1, positions + 1))
        assert shape.splits_within(positions) in (most, shape.most_splits)
        assert most <= shape.splits_within(positions)


@by_head_dim
def test_shapes_are_what_tensor_cores_and_the_search_for_work_take(head_dim: int) -> None:
    shape = split_shape(head_dim)
    assert shape.tile_tokens & (shape.tile_tokens - 1) == 0 and shape.tile_tokens >= 16
    assert shape.least_tokens % shape.tile_tokens == 0
    assert MOST_LAUNCH_ROWS * shape.most_splits < 2**20  # the kernel counts rows and their splits in one int32
    assert MOST_LAUNCH_ROWS < 2**11


@pytest.mark.parametrize("path", [TUNED, PINNED], ids=lambda path: path.name)
@pytest.mark.parametrize("seed", range(20))
def test_the_layout_holds_the_scratch_of_any_launch(path: FlashInferPath, seed: int) -> None:
    rng = np.random.default_rng(seed)
    head_dim = int(rng.choice([64, 128, 256]))
    limits = Limits(
        int(rng.integers(1, 600)), int(rng.integers(1, 9000)), int(rng.integers(1, 40000)), int(rng.choice([1, 16, 64]))
    )
    capacity = flashinfer_capacity(geometry(int(rng.integers(1, 9)), int(rng.integers(1, 9)), head_dim), limits, path)
    layout, shape = path.layout(capacity), split_shape(head_dim)
    for by_token in {False, True} if path.pinned else {False}:
        rows = launch_rows(capacity, by_token=by_token)
        assert 1 <= rows <= MOST_LAUNCH_ROWS and rows <= capacity.tokens
        pairs = rows * capacity.kv_heads
        splits = max(splits_of(shape, capacity.positions), shape.splits_within(capacity.positions))
        heads = pairs * splits * capacity.attention.group_size
        assert layout.spec("float_workspace").bytes >= 4 * heads * (head_dim + 2)
        assert layout.spec("decode_workspace").bytes >= 4 * pairs


def test_a_pinned_plan_serves_a_long_chunk_in_blocks_however_few_requests_there_are() -> None:
    capacity = flashinfer_capacity(geometry(5, 2, 128), Limits(1, 4096, 4096, 16), PINNED)
    assert launch_rows(capacity, by_token=True) == 64
    assert launch_rows(capacity, by_token=False) == 1


def test_a_plan_for_decode_rows_alone_holds_nothing_that_a_planner_would_write() -> None:
    limits = Limits(64, 8192, 4096, 16)
    layouts = [
        path.layout(flashinfer_capacity(geometry(5, 8, 128), limits, path))
        for path in (TUNED, FlashInferPath(DecodeKernel.PAGED_PREFILL))
    ]
    assert layouts[0].spec("decode_workspace").bytes == 64 * 8 * 4
    assert "decode_indptr" not in {spec.name for spec in layouts[0].specs}
    assert "decode_indptr" in {spec.name for spec in layouts[1].specs}


def test_states_beyond_the_kernels_arithmetic_are_refused_by_name() -> None:
    capacity = flashinfer_capacity(geometry(64, 2048, 64), Limits(256, 256, 4096, 16), TUNED)
    with pytest.raises(CapacityExceeded, match="states of split rows"):
        SplitScratch.of(capacity, 256, attrs.evolve(split_shape(64), most_splits=64))
