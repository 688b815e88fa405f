"""What the split-KV kernel alone promises: bits that depend on the row alone, and lengths read on the device.

And that it is right where the committed table has it serve steps of few rows beside another kernel.
"""

from __future__ import annotations

import itertools

import attrs
import numpy as np
import pytest
import torch
from tests.support.attention import batch_of
from tests.support.cuda import (
    FEW_ROWS,
    SPLIT_KV,
    PagedRows,
    bound_owner,
    capacity_here,
    few_rows_here,
    served_path,
    untimed_path,
)

from trivet.attention.flashinfer.owner import FlashInferOwner
from trivet.attention.flashinfer.paths import FlashInferPath
from trivet.capacity import Limits

LENGTHS = [1, 16, 17, 127, 128, 129, 511, 512, 513, 700, 1000, 2047, 4095, 4096, 33, 8192]
SHAPES = [(5, 128), (6, 256), (7, 64)]
EDGES = [32768, 1, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 1023, 1024, 1025, 2047, 4097, 20001, 8192]
"""Contexts around the pages, tiles and splits of every committed shape, and long ones."""
PUBLISHED_KV_HEADS = {128: 8, 256: 4}
"""By head dim, of the models that the table was made for."""
by_shape = pytest.mark.parametrize(("group", "head_dim"), SHAPES, ids=str)


def bound(group: int, head_dim: int, limits: Limits, *, pinned: bool = False) -> FlashInferOwner:
    path = FlashInferPath(SPLIT_KV, pinned=True) if pinned else untimed_path(SPLIT_KV)
    return bound_owner(path, capacity_here(path, group, 2, head_dim, limits))


def whole_contexts(owner: FlashInferOwner) -> tuple[PagedRows, list[list[int]]]:
    """One decode row of each length, whose last token is in the cache too, and the pages of each."""
    counts = [-(-length // owner.capacity.limits.page_size) for length in LENGTHS]
    edges = np.concatenate([[0], np.cumsum(counts)])
    order = np.random.default_rng(2).permutation(edges[-1])
    pages = [order[first:last].tolist() for first, last in itertools.pairwise(edges)]
    rows = PagedRows.drawn(owner.capacity, [1] * len(LENGTHS), LENGTHS, len(LENGTHS), pages=pages)
    rows.assert_right(rows.attended_by(owner))
    return rows, pages


def attended(owner: FlashInferOwner, whole: PagedRows, pages: list[list[int]], rows: list[int]) -> torch.Tensor:
    lengths = [LENGTHS[row] for row in rows]
    batch = batch_of(owner.capacity, [1] * len(rows), lengths, [pages[row] for row in rows])
    owner.update(attrs.evolve(batch, decode_rows=len(rows)))
    return owner.attend(whole.query[rows], whole.cache_keys, whole.cache_values)


@by_shape
@pytest.mark.parametrize("pinned", [False, True], ids=["tuned", "pinned"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(group: int, head_dim: int, pinned: bool) -> None:
    owner = bound(group, head_dim, Limits(64, 64, 8192, 16), pinned=pinned)
    whole, pages = whole_contexts(owner)
    together = attended(owner, whole, pages, list(range(len(LENGTHS))))
    rng = np.random.default_rng(0)
    for row in range(len(LENGTHS)):
        assert torch.equal(attended(owner, whole, pages, [row])[0], together[row]), LENGTHS[row]
    for count in (2, 7, 16, 33, 64):
        rows = rng.integers(0, len(LENGTHS), count).tolist()
        assert torch.equal(attended(owner, whole, pages, rows), together[rows]), rows


@by_shape
def test_under_the_pinned_policy_chunks_of_any_length_and_decode_rows_give_the_same_bits(
    group: int, head_dim: int
) -> None:
    owner = bound(group, head_dim, Limits(8, 512, 2048, 16), pinned=True)
    length, tokens = 1200, 300
    whole = PagedRows.drawn(owner.capacity, [tokens], [length], 0)
    expected = whole.attended_by(owner)
    whole.assert_right(expected)
    pages = whole.batch.page_indices.tolist()
    for chunk in (1, 7, 64, 128):
        given = []
        for last in range(length - tokens + chunk, length + 1, chunk):
            for decode_rows in {0, 1 if chunk == 1 else 0}:
                batch = batch_of(owner.capacity, [chunk], [last], [pages[: -(-last // 16)]])
                owner.update(attrs.evolve(batch, decode_rows=decode_rows))
                first = last - chunk - (length - tokens)
                out = owner.attend(whole.query[first : first + chunk], whole.cache_keys, whole.cache_values)
                assert torch.equal(out, expected[first : first + chunk]), (chunk, last)
                given.append(out)
        assert given


@by_shape
def test_under_the_pinned_policy_mixed_steps_equal_float32_attention(
    group: int, head_dim: int, record_property
) -> None:
    owner = bound(group, head_dim, Limits(24, 640, 4096, 16), pinned=True)
    errors = []
    for query_lengths, kv_lengths, decodes in (
        ([1, 97, 300], [1, 2000, 300], 0),
        ([1] * 3 + [1, 257, 300], [17, 128, 4096, 80, 1500, 300], 3),
        ([1] * 20, list(range(1, 4000, 200)), 20),
    ):
        rows = PagedRows.drawn(owner.capacity, query_lengths, kv_lengths, decodes)
        errors.append(rows.assert_right(rows.attended_by(owner)))
    record_property("worst_error", max(errors))


def test_a_graph_reads_lengths_and_pages_that_were_written_on_the_device_after_its_capture() -> None:
    owner = bound(5, 128, Limits(16, 16, 8192, 16))
    whole, pages = whole_contexts(owner)
    names = ("page_indices", "page_indptr", "last_page_len", "batch_indices", "positions")
    rows = list(range(len(LENGTHS)))
    expected = attended(owner, whole, pages, rows)
    written = {name: owner.buffers[name].clone() for name in names}
    short = attrs.evolve(batch_of(owner.capacity, [1] * len(rows), [1] * len(rows)), decode_rows=len(rows))
    owner.update(short)
    owner.attend(whole.query, whole.cache_keys, whole.cache_values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = owner.attend(whole.query, whole.cache_keys, whole.cache_values)
    for name in names:
        owner.buffers[name].copy_(written[name])
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
    assert not owner.buffers["decode_workspace"].any(), "a counter was left"


def test_an_empty_row_gives_zeros() -> None:
    owner = bound(5, 128, Limits(4, 4, 256, 16))
    rows = PagedRows.drawn(owner.capacity, [1] * 3, [20, 5, 200], 3)
    expected = rows.attended_by(owner)
    indptr = owner.buffers["page_indptr"]
    indptr[1] = 0  # the first row has no pages, and the second those of both, of which it reads too many
    out = owner.attend(rows.query, rows.cache_keys, rows.cache_values)
    assert not out[0].any()
    assert torch.equal(out[2], expected[2])


@pytest.mark.parametrize(("group", "head_dim"), FEW_ROWS)
def test_steps_of_few_rows_are_right_on_both_sides_of_every_committed_threshold(
    group: int, head_dim: int, record_property
) -> None:
    """Through the path that serves, one owner for all: NaN lies in padding and free pages and behind contexts."""
    from trivet.attention.flashinfer.split_kv import SplitKv

    few = few_rows_here(group, head_dim)
    kv_heads = PUBLISHED_KV_HEADS.get(head_dim, 2)
    path = served_path(group, kv_heads, head_dim)
    capacity = capacity_here(path, group, kv_heads, head_dim, Limits(few[-1].rows + 3, 640, 32768, 16))
    assert path.choice(capacity).few_rows == few
    owner = bound_owner(path, capacity)
    errors = []

    def serve(lengths: list[int], chunks: list[tuple[int, int]], seed: int) -> None:
        decodes = len(lengths)
        rows = PagedRows.drawn(
            capacity,
            [1] * decodes + [tokens for tokens, _ in chunks],
            lengths + [length for _, length in chunks],
            decodes,
            seed,
        )
        out = rows.attended_by(owner)
        served_by = owner._step.parts[0].kernel
        assert isinstance(served_by, SplitKv) == (decodes <= few[-1].rows)
        errors.append(rows.assert_right(out))
        assert torch.equal(rows.attended_by(owner), out), f"two runs of {decodes} rows differ"

    for rows in sorted({1, *(each.rows + beyond for each in few for beyond in (0, 1))}):
        serve(EDGES[:rows], [], rows)
        serve(EDGES[::-1][:rows], [], rows)
        serve(EDGES[::-1][:rows], [(1, 33), (300, 2000)], rows)
    record_property("worst_error", max(errors))
