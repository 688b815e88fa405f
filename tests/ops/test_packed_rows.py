"""Packed rows are indexed once, and short rows do not pay for long ones."""

import pytest
import torch

from trivet.caches.state import StateCut
from trivet.capacity.chunks import DEVICE_CHUNK_TOKENS
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


@pytest.mark.parametrize("before", [0, 2])
def test_chunks_of_a_table_cover_every_token_once_and_cross_no_cut(before: int) -> None:
    lengths = [200, 1, 70, 3]
    cuts = [StateCut(2, 64, 9), StateCut(0, 130, 7), StateCut(0, 65, 4), StateCut(3, 1, 5)]
    cuts = [cut._replace(row=cut.row + before) for cut in cuts]
    table = PackedRows([1] * before + lengths, cuts=cuts).table(before)
    starts = table.starts.tolist()
    found, kept, numbers = [], [], []
    for segment, number in table.chunks.tolist():
        row, tokens_before, snapshot = table.segments[segment].tolist()
        begin, end = starts[segment : segment + 2]
        numbers.append(number)
        chunk = list(range(begin, end))[number * DEVICE_CHUNK_TOKENS :][:DEVICE_CHUNK_TOKENS]
        row_begin = begin - tokens_before
        found += [(row, token - row_begin) for token in chunk]
        if chunk[-1] == end - 1 and snapshot >= 0:
            kept.append(StateCut(row + before, end - row_begin, snapshot))
    assert found == [(row, token) for row, length in enumerate(lengths) for token in range(length)]
    assert kept == sorted(cuts)
    assert numbers == [0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0]  # of segments of 65, 65, 70, 1, 64, 6, 1 and 2 tokens
    assert table.row_segments.tolist() == [0, 3, 4, 6, 8]
    assert table.segments[:, 0].tolist() == [0, 0, 0, 1, 2, 2, 3, 3]
    assert table.cuts == len(cuts)


def test_parts_of_a_table_begin_at_whole_vectors_whatever_the_rows() -> None:
    for lengths, cuts in (([5], []), ([5, 9], [StateCut(1, 3, 0)]), ([5, 9, 2], [])):
        table = PackedRows(lengths, cuts=cuts).table(0)
        for part in (table.starts, table.chunks, table.segments, table.row_segments):
            assert part.storage_offset() % 2 == 0 and part.is_contiguous()


@pytest.mark.parametrize("cut", [(-1, 1), (2, 1), (0, 0), (0, 4), (1, 1)])
def test_a_cut_that_is_not_inside_a_row_is_refused(cut: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="inside one of rows"):
        PackedRows([4, 1], cuts=[StateCut(*cut, 0)])


def test_two_cuts_at_one_place_are_refused() -> None:
    with pytest.raises(ValueError, match="one at a place"):
        PackedRows([4], cuts=[StateCut(0, 2, 0), StateCut(0, 2, 1)])


def test_a_table_without_a_row_that_is_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="rows from 1 on"):
        PackedRows([4, 4], cuts=[StateCut(0, 2, 0)]).table(1)
