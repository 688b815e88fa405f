"""FlashInfer's owners attend rightly: against float32 attention and the reference backend, on the same device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from attrs import evolve
from tests.support.attention import geometry
from tests.support.cuda import (
    COMPILED,
    PAGED_PREFILL,
    SPLIT_KV,
    PagedRows,
    bound_owner,
    capacity_here,
    untimed_path,
)
from tests.support.room import room_on_device

from trivet.attention.flashinfer.kinds import DecodeKernel
from trivet.attention.flashinfer.paths import FlashInferPath
from trivet.attention.reference.owner import ReferenceOwner
from trivet.attention.reference.path import STANDARD_TILE
from trivet.capacity import Limits, PlanCapacity

Record = Callable[[str, object], None]

HOPPER_FROM = {64: None, 128: 256, 256: 256}
"""The Hopper kernel of head dim 64 does not come built."""

LARGE_ELEMENTS = 2**31
"""A cache of as many is beyond what 32-bit offsets reach."""

SHAPES = [
    *(
        (kernel, group, head_dim)
        for kernel in (PAGED_PREFILL, SPLIT_KV)
        for group in (4, 5, 6, 7)
        for head_dim in (64, 128, 256)
    ),
    *((COMPILED, group, head_dim) for group in (4, 6) for head_dim in (64, 128, 256)),
    (COMPILED, 1, 128),
    (COMPILED, 8, 128),
    (PAGED_PREFILL, 1, 128),
    (PAGED_PREFILL, 20, 128),
    (SPLIT_KV, 1, 128),
    (SPLIT_KV, 20, 128),
]


def steps(page_size: int) -> list[tuple[list[int], list[int], int]]:
    """Query lengths, KV lengths and decode rows: pure decode, prefill short and long, mixed."""
    edges = [1, page_size, page_size + 1, 2 * page_size - 1, 127, 128, 129, 2047, 2048, 4096, 3, 700, 1000, 64, 65, 333]
    return [
        ([1], [4096], 1),
        ([1] * len(edges), edges, len(edges)),
        ([1, 97, 300], [1, 2000, 300], 0),
        ([400, 239], [3000, 239], 0),
        ([1] * 9 + [1, 257, 300], [*edges[1:10], 80, 1500, 300], 9),
        ([1] * 2 + [600], [4000, 5, 600], 2),
    ]


def shaped(decode: DecodeKernel, group: int, head_dim: int, limits: Limits) -> tuple[FlashInferPath, PlanCapacity]:
    path = untimed_path(decode, HOPPER_FROM[head_dim])
    return path, capacity_here(path, group, 2, head_dim, limits)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("decode", "group", "head_dim"), SHAPES, ids=str)
def test_equals_float32_attention_in_pure_prefill_and_mixed_steps_beside_nan(
    decode: DecodeKernel, group: int, head_dim: int, page_size: int, record_property: Record
) -> None:
    path, capacity = shaped(decode, group, head_dim, Limits(24, 640, 4096, page_size))
    owner = bound_owner(path, capacity)
    errors = []
    for number, (query_lengths, kv_lengths, decodes) in enumerate(steps(page_size)):
        rows = PagedRows.drawn(capacity, query_lengths, kv_lengths, decodes, seed=number)
        errors.append(rows.assert_right(rows.attended_by(owner)))
    record_property("worst_error", max(errors))


@pytest.mark.parametrize(
    ("decode", "group", "head_dim", "page_size"),
    [
        *(
            (kernel, group, head_dim, 16)
            for kernel in (PAGED_PREFILL, SPLIT_KV)
            for group, head_dim in ((4, 128), (5, 128), (6, 256), (7, 64))
        ),
        (COMPILED, 4, 128, 16),
        (COMPILED, 6, 256, 16),
        *((kernel, 4, 128, page_size) for kernel in (PAGED_PREFILL, SPLIT_KV, COMPILED) for page_size in (1, 64)),
    ],
    ids=str,
)
def test_equals_float32_attention_at_contexts_up_to_32768(
    decode: DecodeKernel, group: int, head_dim: int, page_size: int, record_property: Record
) -> None:
    path, capacity = shaped(decode, group, head_dim, Limits(3, 600, 32768, page_size))
    owner = bound_owner(path, capacity)
    errors = []
    for query_lengths, kv_lengths, decodes in (
        ([1], [32768], 1),
        ([1, 1, 512], [32768, 20001, 32768], 2),
        ([1, 1, 40], [32767, 17, 32700], 2),
    ):
        rows = PagedRows.drawn(capacity, query_lengths, kv_lengths, decodes)
        errors.append(rows.assert_right(rows.attended_by(owner)))
    record_property("worst_error", max(errors))


def far_away(near: PagedRows, caches: tuple[torch.Tensor, torch.Tensor]) -> PagedRows:
    """The same rows on the last pages of `caches`, which hold nothing else."""
    pages, last = len(near.cache_keys), len(caches[0]) - 1
    for cache, source in zip(caches, (near.cache_keys, near.cache_values), strict=True):
        assert cache[: last + 1 - pages].numel() >= LARGE_ELEMENTS
        cache[-pages:] = source.flip(0)
    return evolve(
        near,
        batch=evolve(near.batch, page_indices=last - near.batch.page_indices),
        cache_keys=caches[0],
        cache_values=caches[1],
    )


def assert_written_alike(near: PagedRows, far: PagedRows) -> None:
    """The same tokens are on their pages, and nothing is anywhere else on these."""
    for wanted, cache in ((near.cache_keys, far.cache_keys), (near.cache_values, far.cache_values)):
        assert torch.equal(cache[-len(wanted) :].flip(0).nan_to_num(7), wanted.nan_to_num(7))


@pytest.fixture
def room() -> Iterator[None]:
    """Gigabytes of the device's memory."""
    with room_on_device():
        yield


@pytest.mark.usefixtures("room")
def test_pages_that_32_bit_offsets_do_not_reach_are_written_and_read_as_near_ones() -> None:
    """By both kernels that append, all that attend to decode rows, and both that attend to chunks."""
    from trivet.ops.fused.heads import norm_rotate_append

    group, kv_heads, head_dim, page_size, spare_pages = 4, 8, 128, 16, 700
    pages = LARGE_ELEMENTS // (page_size * kv_heads * head_dim) + spare_pages
    limits = Limits(8, 640, 4096, page_size)
    half_table = (limits.max_context, head_dim // 2)
    still = torch.cat((torch.ones(half_table), torch.zeros(half_table)), 1).flatten().cuda()
    keys, values = (
        torch.empty(pages, page_size, kv_heads, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    for decode in (SPLIT_KV, PAGED_PREFILL, COMPILED):
        path = untimed_path(decode, HOPPER_FROM[head_dim])
        capacity = capacity_here(path, group, kv_heads, head_dim, limits)
        owner = bound_owner(path, capacity)
        for query_lengths, kv_lengths, decodes in (
            ([1] * 4, [limits.max_context, 17, 1, 2000], 4),
            ([1, 1, 40], [limits.max_context, 33, 700], 2),
            ([1, 1, 300], [limits.max_context, 33, 700], 2),  # on the Hopper kernel
        ):
            near = PagedRows.drawn(capacity, query_lengths, kv_lengths, decodes)
            far = far_away(near, (keys, values))
            expected = near.attended_by(owner)
            near.assert_right(expected)
            assert torch.equal(far.attended_by(owner), expected), (decode, query_lengths)
            assert_written_alike(near, far)
            # As the layers append, where norms and rotations are fused with it; these turn nothing.
            again = far_away(PagedRows.drawn(capacity, query_lengths, kv_lengths, decodes), (keys, values))
            projected = torch.cat((again.query, *again.new), 1).flatten(1)
            places = owner.token_places(projected)
            norm_rotate_append(projected, group * kv_heads, None, still, head_dim, places, keys, values)
            assert_written_alike(near, again)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [4, 5, 6, 7])
def test_equals_the_reference_backend_on_the_same_device(group: int, head_dim: int, record_property: Record) -> None:
    """On every kernel that serves the shape: pure decode, prefill and mixed steps."""
    limits = Limits(24, 640, 4096, 16)
    paths = [untimed_path(kernel, HOPPER_FROM[head_dim]) for kernel, *shape in SHAPES if shape == [group, head_dim]]
    capacities = [capacity_here(path, group, 2, head_dim, limits) for path in paths]
    owners = {path.name: bound_owner(path, capacity) for path, capacity in zip(paths, capacities, strict=True)}
    assert len(owners) == (3 if group in (4, 6) else 2)
    reference = ReferenceOwner.allocate(PlanCapacity(geometry(group, 2, head_dim), limits, STANDARD_TILE), "cuda")
    worst = dict.fromkeys(owners, 0.0)
    for number, (query_lengths, kv_lengths, decodes) in enumerate(steps(16)):
        rows = PagedRows.drawn(capacities[0], query_lengths, kv_lengths, decodes, seed=number)
        ours = {name: rows.attended_by(owner) for name, owner in owners.items()}
        reference.update(rows.batch)
        theirs = reference.attend(rows.query, rows.cache_keys, rows.cache_values).float()
        scale = theirs.abs().amax(-1)
        for name, out in ours.items():
            worst[name] = max(worst[name], float(((out.float() - theirs).abs().amax(-1) / scale).max()))
    record_property("worst_errors", str(worst))
    assert max(worst.values()) <= 2.5e-2, worst


@pytest.mark.parametrize("decode", [PAGED_PREFILL, COMPILED, SPLIT_KV], ids=str)
def test_half_precision_is_served(decode: DecodeKernel, record_property: Record) -> None:
    path = untimed_path(decode)
    capacity = capacity_here(path, 4, 2, 128, Limits(24, 640, 4096, 16), "float16")
    owner = bound_owner(path, capacity)
    errors = []
    for number, (query_lengths, kv_lengths, decodes) in enumerate(steps(16)):
        rows = PagedRows.drawn(capacity, query_lengths, kv_lengths, decodes, seed=number)
        errors.append(rows.assert_right(rows.attended_by(owner)))
    record_property("worst_error", max(errors))


@pytest.mark.parametrize(("decode", "group"), [(PAGED_PREFILL, 5), (COMPILED, 4), (SPLIT_KV, 5)], ids=str)
def test_rows_that_share_a_prefix_may_list_more_pages_than_the_pool_has(decode: DecodeKernel, group: int) -> None:
    path, capacity = shaped(decode, group, 128, Limits(20, 640, 2048, 16))
    owner = bound_owner(path, capacity)
    shared = list(range(100))
    pages = [[*shared, 100 + row] for row in range(20)]
    lengths = [16 * 100 + 1 + row % 16 for row in range(20)]
    pool = 121
    assert sum(map(len, pages)) > pool * 10
    decodes = PagedRows.drawn(capacity, [1] * 20, lengths, 20, pages=pages, pool_pages=pool)
    decodes.assert_right(decodes.attended_by(owner))
    chunks = [*(1 for _ in range(16)), *(length - 1600 for length in lengths[16:])]
    mixed = PagedRows.drawn(capacity, chunks, lengths, 16, pages=pages, pool_pages=pool)
    mixed.assert_right(mixed.attended_by(owner))


@pytest.mark.parametrize(
    ("decode", "group", "head_dim"),
    [
        (PAGED_PREFILL, 5, 128),
        (PAGED_PREFILL, 6, 256),
        (COMPILED, 4, 64),
        (SPLIT_KV, 5, 128),
        (SPLIT_KV, 6, 256),
        (SPLIT_KV, 7, 64),
    ],
    ids=str,
)
def test_what_lies_outside_the_contexts_changes_no_bit(decode: DecodeKernel, group: int, head_dim: int) -> None:
    path, capacity = shaped(decode, group, head_dim, Limits(24, 640, 4096, 16))
    owner = bound_owner(path, capacity)
    for query_lengths, kv_lengths, decodes in steps(16):
        outputs = [
            PagedRows.drawn(capacity, query_lengths, kv_lengths, decodes, outside=outside).attended_by(owner)
            for outside in (0.0, float("nan"), float("inf"))
        ]
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("decode", [PAGED_PREFILL, SPLIT_KV], ids=str)
def test_a_swapped_page_a_lost_token_and_a_shifted_row_are_seen_by_these_checks(decode: DecodeKernel) -> None:
    path, capacity = shaped(decode, 5, 128, Limits(24, 640, 4096, 16))
    owner = bound_owner(path, capacity)
    rows = PagedRows.drawn(capacity, [1, 1, 30], [20, 33, 50], 2, outside=0.0)
    rows.assert_right(rows.attended_by(owner))
    for name, first, last in (("page_indices", 0, 3), ("last_page_len", 0, 1), ("page_indptr", 1, 2)):
        owner.update(rows.batch)
        held = owner.buffers[name]
        if name == "page_indices":
            held[[first, last]] = held[[last, first]]
        elif name == "last_page_len":
            held[first] -= 2
        else:
            held[first] -= 1
        out = owner.attend(rows.query, rows.cache_keys, rows.cache_values)
        with pytest.raises(AssertionError):
            rows.assert_right(out)
