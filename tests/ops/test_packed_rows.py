"""Packed rows are indexed once, and short rows do not pay for long ones."""

import pytest
import torch

from trivet.ops import PackedRows


def test_indices_are_worked_out_once() -> None:
    packed = PackedRows([3, 1, 40])
    assert packed.edges(4) is packed.edges(4)
    assert packed.grids is packed.grids
    assert packed.singles is packed.singles


def test_rows_of_one_token_take_no_chunk() -> None:
    packed = PackedRows([400, 1, 1, 1, 1, 1])
    (grid,) = packed.grids
    assert grid.chunks * grid.chunk_tokens == 416  # 400 tokens in whole chunks of 32
    assert packed.singles is not None
    assert packed.singles.rows.tolist() == [1, 2, 3, 4, 5]


def test_short_rows_are_not_padded_to_the_chunks_of_long_ones() -> None:
    packed = PackedRows([2, 400, 2, 3])
    assert sum(grid.chunks * grid.chunk_tokens for grid in packed.grids) == 416 + 3 * 4


@pytest.mark.parametrize(("length", "chunk"), [(2, 2), (3, 4), (9, 16), (32, 32), (33, 32)])
def test_a_short_row_gets_a_chunk_of_its_length(length: int, chunk: int) -> None:
    (grid,) = PackedRows([length]).grids
    assert grid.chunk_tokens == chunk


@pytest.mark.parametrize("lengths", [[], [0], [4, 0], [3, -1]])
def test_empty_rows_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="rows of at least one token"):
        PackedRows(lengths)


@pytest.mark.parametrize("chunk_tokens", [0, -1, 48])
def test_a_chunk_that_is_no_power_of_two_is_refused(chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        PackedRows([1], chunk_tokens=chunk_tokens)


def test_indices_live_on_the_device_of_the_tensors() -> None:
    packed = PackedRows([5, 1, 40], device="meta")
    (short, long), singles, edges = packed.grids[::-1], packed.singles, packed.edges(4)
    assert singles is not None
    for indices in (short.source, long.source, singles.rows, edges.tokens, edges.tails):
        assert indices.device == torch.device("meta")
