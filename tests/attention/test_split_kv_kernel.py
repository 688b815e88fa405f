"""The split-KV kernel itself, interpreted on the CPU under an owner: against float64, beside NaN, and bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import pytest
import torch
from tests.support.attention import Contexts, batch_of, geometry
from tests.support.flashinfer import NoFence, flashinfer_capacity, torch_append, unpinned
from tests.support.interpreter import missing_interpreter, serve_as_loop_bounds

from trivet.attention import StepBatch
from trivet.attention.flashinfer.kinds import DecodeKernel
from trivet.attention.flashinfer.owner import FlashInferOwner
from trivet.attention.flashinfer.paths import FlashInferPath
from trivet.attention.flashinfer.protocol import Kernels
from trivet.attention.flashinfer.splits import split_shape
from trivet.capacity import Limits, PlanCapacity
from trivet.errors import ConfigError

pytestmark = pytest.mark.skipif(missing_interpreter() is not None, reason=str(missing_interpreter()))

PATHS = {by_token: FlashInferPath(DecodeKernel.SPLIT_KV, pinned=by_token) for by_token in (False, True)}
FEW_PROGRAMS = 6
"""Each takes several splits in turn, and the interpreter runs few."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    serve_as_loop_bounds(monkeypatch)
    yield


def capacity_of(group: int, head_dim: int, limits: Limits, kv_heads: int = 2) -> PlanCapacity:
    return flashinfer_capacity(geometry(group, kv_heads, head_dim), limits, PATHS[False])


def owner_of(capacity: PlanCapacity, *, by_token: bool = False, programs: int = FEW_PROGRAMS) -> FlashInferOwner:
    from trivet.attention.flashinfer.split_kv import SplitKv

    decode, chunks = SplitKv(capacity, by_token=by_token), SplitKv(capacity, by_token=True)
    decode._programs = chunks._programs = programs
    buffers = unpinned(PATHS[by_token].layout(capacity))
    buffers["float_workspace"].view(torch.uint8).fill_(255)  # NaN, as float32
    return FlashInferOwner(capacity, buffers, Kernels(decode, chunks, None, torch_append), fence=NoFence)


def attended(owner: FlashInferOwner, batch: StepBatch, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """What the owner gives on a cache that is NaN outside the contexts, and what float64 gives."""
    generator = torch.Generator().manual_seed(seed)
    contexts = Contexts.drawn(owner.capacity, batch, generator)
    heads = owner.capacity.query_heads, owner.capacity.head_dim
    query = 2 * torch.randn(batch.tokens, *heads, generator=generator)
    owner.update(batch)
    owner.append(*contexts.new(batch), contexts.cache_keys, contexts.cache_values)
    out = owner.attend(query, contexts.cache_keys, contexts.cache_values)
    assert not owner.buffers["decode_workspace"].any(), "a counter was left"
    return out, contexts.attended(batch, query)


def scattered(capacity: PlanCapacity, query_lengths: list[int], kv_lengths: list[int], decode_rows: int) -> StepBatch:
    """Rows on pages in no order. Page 0, which stands in for pages past a row's end, is none of them."""
    counts = [-(-length // capacity.limits.page_size) for length in kv_lengths]
    order = iter((1 + np.random.default_rng(1).permutation(sum(counts))).tolist())
    pages = [[next(order) for _ in range(count)] for count in counts]
    return attrs.evolve(batch_of(capacity, query_lengths, kv_lengths, pages), decode_rows=decode_rows)


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("by_token", [False, True], ids=["by row", "by token"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (4, 128), (5, 128), (6, 256), (7, 64), (5, 64), (20, 64)])
def test_decode_rows_equal_float64_at_the_borders_of_pages_tiles_and_splits(
    group: int, head_dim: int, page_size: int, by_token: bool
) -> None:
    tile, split = split_shape(head_dim).tile_tokens, split_shape(head_dim).least_tokens
    borders = [page_size, 2 * page_size, tile, split, 2 * split, 3 * split]
    lengths = [1, *(border + step for border in borders for step in (-1, 0, 1) if border + step > 0)]
    capacity = capacity_of(group, head_dim, Limits(len(lengths), len(lengths), max(lengths), page_size), kv_heads=1)
    owner = owner_of(capacity, by_token=by_token)
    assert_close(*attended(owner, scattered(capacity, [1] * len(lengths), lengths, len(lengths))))


def test_a_row_with_more_keys_than_the_most_splits_hold_has_longer_splits() -> None:
    shape = split_shape(64)
    length = shape.least_tokens * shape.most_splits + 1
    assert shape.split_tokens(length) > shape.least_tokens
    capacity = capacity_of(2, 64, Limits(2, 2, length, 64), kv_heads=1)
    assert_close(*attended(owner_of(capacity), scattered(capacity, [1, 1], [length, 70], 2)))


@pytest.mark.parametrize("by_token", [False, True], ids=["by row", "by token"])
def test_prefill_and_mixed_steps_equal_float64_token_by_token_and_in_blocks(by_token: bool) -> None:
    capacity = capacity_of(5, 64, Limits(5, 150, 300, 16))
    owner = owner_of(capacity, by_token=by_token)
    for query_lengths, kv_lengths, decodes in (
        ([1, 1, 40, 100], [17, 1, 45, 290], 2),
        ([128, 3], [128, 200], 0),
        ([1, 1, 0, 2], [130, 128, 40, 2], 2),
    ):
        assert_close(*attended(owner, scattered(capacity, query_lengths, kv_lengths, decodes)))


def test_a_row_has_the_same_bits_alone_in_any_batch_in_any_chunk_and_on_any_grid() -> None:
    capacity = capacity_of(5, 64, Limits(6, 100, 400, 16))
    lengths, pages = [390, 40, 129, 257], [list(range(25)), [3, 4, 5], list(range(9)), list(range(17))]
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(25, 16, 2, 64, generator=generator) for _ in range(2))
    query = torch.randn(4, 10, 64, generator=generator)

    def given(owner: FlashInferOwner, rows: list[int], chunk: bool = False) -> torch.Tensor:
        batch = batch_of(capacity, [1] * len(rows), [lengths[row] for row in rows], [pages[row] for row in rows])
        owner.update(attrs.evolve(batch, decode_rows=0 if chunk else len(rows)))
        return owner.attend(query[rows], keys, values)

    together = given(owner_of(capacity), [0, 1, 2, 3])
    for owner in (owner_of(capacity, programs=1), owner_of(capacity, by_token=True, programs=40)):
        for rows in ([0], [3, 1], [2, 0, 3]):
            for chunk in (False, True):
                assert torch.equal(given(owner, rows, chunk), together[rows]), (rows, chunk)
    # a chunk of three tokens: each token has the bits of a decode row of its length
    owner = owner_of(capacity, by_token=True)
    owner.update(batch_of(capacity, [2, 3], [40, 390], [pages[1], pages[0]]))
    chunk = owner.attend(query[[0, 1, 2, 3, 0]], keys, values)
    assert torch.equal(chunk[4], together[0])
    assert torch.equal(chunk[1], together[1])


def test_rows_that_share_pages_each_read_their_own_length() -> None:
    capacity = capacity_of(4, 64, Limits(3, 3, 200, 16))
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(13, 16, 2, 64, generator=generator) for _ in range(2))
    query = torch.randn(3, 8, 64, generator=generator)
    shared, lengths = list(range(10)), [161, 170, 160]
    batch = batch_of(capacity, [1, 1, 1], lengths, [[*shared, 11], [*shared, 12], shared])
    owner = owner_of(capacity)
    owner.update(attrs.evolve(batch, decode_rows=3))
    out = owner.attend(query, keys, values)
    rows = [
        [cache[pages].flatten(0, 1)[:length] for cache in (keys, values)]
        for pages, length in zip(([*shared, 11], [*shared, 12], shared), lengths, strict=True)
    ]
    contexts = Contexts([row[0] for row in rows], [row[1] for row in rows], keys, values)
    assert_close(out, contexts.attended(batch, query))


def test_an_empty_row_gives_zeros_and_lengths_are_read_on_the_device() -> None:
    capacity = capacity_of(3, 64, Limits(3, 3, 200, 16))
    owner = owner_of(capacity)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(40, 16, 2, 64, generator=generator) for _ in range(2))
    query = torch.randn(3, 6, 64, generator=generator)
    of_lengths = {n: attrs.evolve(batch_of(capacity, [1] * 3, [n, 5, 200]), decode_rows=3) for n in (3, 180)}
    owner.update(of_lengths[180])
    expected = owner.attend(query, keys, values)
    arrays = {name: owner.buffers[name].clone() for name in ("page_indices", "page_indptr", "last_page_len")}
    owner.update(of_lengths[3])
    for name, array in arrays.items():
        owner.buffers[name].copy_(array)  # as a graph would find them, planned for other lengths
    assert torch.equal(owner.attend(query, keys, values), expected)
    indptr = owner.buffers["page_indptr"]
    indptr[1:] -= indptr[1].item()
    out = owner.attend(query, keys, values)
    assert not out[0].any() and bool(out.isfinite().all())


def test_tensors_that_the_kernel_would_misread_are_refused() -> None:
    capacity = capacity_of(2, 64, Limits(2, 2, 20, 16))
    owner = owner_of(capacity)
    owner.update(attrs.evolve(batch_of(capacity, [1], [5]), decode_rows=1))
    cache = torch.zeros(4, 16, 2, 64)
    with pytest.raises(ConfigError, match="contiguous"):
        owner.attend(torch.zeros(1, 4, 64), cache.transpose(0, 1).contiguous().transpose(0, 1), cache)
    with pytest.raises(ConfigError, match="multiples of 8"):
        owner.attend(torch.zeros(1, 4, 65)[..., :64], cache, cache)
