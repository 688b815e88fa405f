"""The plan-owner contract on real FlashInfer plans: lengths, pointers, allocations, staging, captured graphs."""

from __future__ import annotations

import random
import time

import attrs
import numpy as np
import pytest
import torch
from tests.support.attention import batch_of, geometry
from tests.support.cuda import (
    COMPILED,
    FEW_ROWS,
    PAGED_PREFILL,
    SPLIT_KV,
    PagedRows,
    bound_owner,
    capacity_here,
    device_here,
    few_rows_here,
    served_path,
    untimed_path,
)

from trivet.attention import PathRequest, StepBatch, select_path
from trivet.attention.flashinfer import probe
from trivet.attention.flashinfer.captures import PlanMismatch
from trivet.attention.flashinfer.kinds import DecodeKernel
from trivet.attention.flashinfer.layout import chunk_workspace, decode_workspace
from trivet.attention.flashinfer.owner import FlashInferOwner, _host_rows
from trivet.attention.flashinfer.paths import FlashInferPath
from trivet.attention.flashinfer.protocol import PlanSpaces, RowKernel
from trivet.attention.paths import standard_paths
from trivet.capacity import Limits, PlanCapacity
from trivet.errors import CapacityExceeded, ConfigError

KERNELS = [
    *(
        (kernel, group, head_dim)
        for kernel in (PAGED_PREFILL, SPLIT_KV)
        for group in (4, 5, 6, 7)
        for head_dim in (64, 128, 256)
    ),
    *((COMPILED, group, head_dim) for group in (4, 6) for head_dim in (64, 128, 256)),
]
by_kernel = pytest.mark.parametrize(("decode", "group", "head_dim"), KERNELS, ids=str)
by_kernel_and_page_size = pytest.mark.parametrize(
    ("decode", "group", "head_dim", "page_size"),
    [
        *((*kernel, 16) for kernel in KERNELS),
        *(
            (kernel, group, 128, page_size)
            for kernel, group in ((PAGED_PREFILL, 5), (SPLIT_KV, 5), (COMPILED, 4))
            for page_size in (1, 64)
        ),
    ],
    ids=str,
)


def bound(decode: DecodeKernel, group: int, limits: Limits, head_dim: int = 128) -> FlashInferOwner:
    path = untimed_path(decode, None if head_dim == 64 else 256)
    return bound_owner(path, capacity_here(path, group, 2, head_dim, limits))


def random_step(rng: np.random.Generator, capacity: PlanCapacity) -> StepBatch:
    """A step within `capacity`, decode rows first."""
    rows = int(rng.integers(1, capacity.requests + 1))
    decodes = int(rng.integers(0, rows + 1))
    kv_lengths = rng.integers(1, capacity.positions + 1, rows)
    left, query_lengths = capacity.tokens - rows, [1] * rows
    for row in range(decodes, rows):
        taken = int(rng.integers(0, min(int(kv_lengths[row]) - 1, left) + 1))
        query_lengths[row] += taken
        left -= taken
    pages = [rng.integers(0, 50, -(-length // capacity.limits.page_size)).tolist() for length in kv_lengths.tolist()]
    batch = batch_of(capacity, query_lengths, kv_lengths.tolist(), pages)
    return attrs.evolve(batch, decode_rows=decodes)


@by_kernel_and_page_size
def test_updates_move_no_pointer_and_allocate_nothing_on_the_device(
    decode: DecodeKernel, group: int, head_dim: int, page_size: int
) -> None:
    rng = np.random.default_rng(0)
    owner = bound(decode, group, Limits(16, 512, 4096, page_size), head_dim)
    steps = [random_step(rng, owner.capacity) for _ in range(150)]
    pointers = owner.buffers.pointers()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for step in steps:
        owner.update(step)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    assert after["allocation.all.allocated"] == before["allocation.all.allocated"]
    assert after["segment.all.allocated"] == before["segment.all.allocated"]
    assert owner.buffers.pointers() == pointers


@by_kernel_and_page_size
def test_live_storages_have_the_bytes_that_the_layout_reserves(
    decode: DecodeKernel, group: int, head_dim: int, page_size: int
) -> None:
    owner = bound(decode, group, Limits(16, 512, 4096, page_size), head_dim)
    for spec in owner.buffers.layout.specs:
        tensor = owner.buffers[spec.name]
        assert tensor.untyped_storage().nbytes() == spec.bytes
        assert tensor.is_pinned() == spec.pinned and tensor.is_cuda != spec.pinned


@by_kernel
@pytest.mark.parametrize(
    ("dimension", "query_lengths", "kv_lengths", "changes"),
    [
        ("requests", [1, 1, 1], [1, 1, 1], {}),
        ("tokens", [5, 4], [5, 4], {}),
        ("positions", [1], [13], {}),
        ("query_heads", [1, 1], [12, 12], {"query_heads": 11}),
        ("kv_heads", [1, 1], [12, 12], {"kv_heads": 3}),
        ("pages_per_request", [1, 1], [12, 12], {"page_indptr": [0, 4], "page_indices": [0, 1, 2, 3]}),
        ("pages", [1, 1], [12, 12], {"page_indptr": [0, 3, 6], "page_indices": list(range(7))}),
        ("indptr", [1, 1], [12, 12], {"page_indptr": [0, 3, 6, 6]}),
    ],
)
def test_one_past_a_dimension_raises_with_its_name_and_writes_nothing(
    decode: DecodeKernel,
    group: int,
    head_dim: int,
    dimension: str,
    query_lengths: list[int],
    kv_lengths: list[int],
    changes: dict[str, object],
) -> None:
    owner = bound(decode, group, Limits(2, 8, 12, 4), head_dim)
    if dimension == "query_heads":
        changes = {"query_heads": owner.capacity.query_heads + 1}
    owner.update(batch_of(owner.capacity, [2], [7]))
    before = {name: owner.buffers[name].clone() for name in owner.buffers.pointers()}
    batch = attrs.evolve(batch_of(owner.capacity, query_lengths, kv_lengths), **changes)
    with pytest.raises(CapacityExceeded) as raised:
        owner.update(batch)
    assert raised.value.dimension == dimension
    assert raised.value.requested == raised.value.bound + 1
    assert all(torch.equal(before[name], owner.buffers[name]) for name in before), "a refused update wrote"


@by_kernel
def test_more_tiles_than_the_capacity_raise_with_that_name(decode: DecodeKernel, group: int, head_dim: int) -> None:
    owner = bound(decode, group, Limits(16, 512, 4096, 16), head_dim)
    object.__setattr__(owner.capacity, "tiles", 3)
    with pytest.raises(CapacityExceeded, match="tiles"):
        owner.update(batch_of(owner.capacity, [60, 4], [60, 4]))


@by_kernel
@pytest.mark.parametrize("name", ["decode_workspace", "chunk_workspace", "float_workspace"])
def test_a_workspace_shorter_than_the_library_asks_for_is_refused_at_bind(
    decode: DecodeKernel, group: int, head_dim: int, name: str
) -> None:
    """A sixty-fourth is too short for any shape: of bounds on threads, few shapes reach more than a part."""
    path = untimed_path(decode)
    capacity = capacity_here(path, group, 2, head_dim, Limits(16, 512, 4096, 16))
    layout = path.layout(capacity)
    shorter = layout.with_elements(name, layout.spec(name).elements // 64)
    with pytest.raises(CapacityExceeded, match=name):
        path.bind(capacity, shorter.allocate("cuda"))


@pytest.mark.parametrize("seed", range(4))
def test_our_bounds_hold_what_the_planners_take_over_random_capacities_and_steps(seed: int) -> None:
    from trivet.attention.flashinfer import kernels

    rng = random.Random(seed)
    for _ in range(6):
        group, kv_heads = rng.choice([1, 2, 4, 5, 6, 7, 8, 20]), rng.choice([1, 2, 4, 8])
        limits = Limits(
            rng.choice([1, 3, 8, 64, 256]),
            rng.choice([1, 16, 256, 2048, 8192]),
            rng.choice([7, 1024, 4096, 32768]),
            rng.choice([1, 16, 64]),
        )
        for decode in (PAGED_PREFILL, COMPILED):
            head_dim = rng.choice([128, 256])
            if decode is COMPILED and not probe.decode_compiles("bfloat16", head_dim, group):
                continue
            path = untimed_path(decode, 1)
            capacity = capacity_here(path, group, kv_heads, head_dim, limits)
            choice = path.choice(capacity)
            loaded = kernels.load_kernels(capacity, choice)
            of_kind: list[tuple[RowKernel | None, int, int, bool]] = []
            for kernel, workspace, decodes in (
                (loaded.decode, decode_workspace(capacity, choice), True),
                (loaded.chunks, chunk_workspace(capacity, choice), False),
                (loaded.long_chunks, chunk_workspace(capacity, choice), False),
            ):
                of_kind.append((kernel, workspace.float_bytes, workspace.int_bytes, decodes))
            for kernel, float_bytes, int_bytes, decodes in of_kind:
                assert kernel is not None
                spaces = PlanSpaces(
                    torch.empty(max(float_bytes, 1), dtype=torch.uint8, device="cuda"),
                    torch.empty(int_bytes, dtype=torch.uint8, device="cuda"),
                    torch.empty(int_bytes, dtype=torch.uint8, pin_memory=True),
                )
                for _ in range(3):
                    rows = rng.randint(1, min(capacity.requests, capacity.tokens))
                    lengths = np.ones(rows, np.int32)
                    left = 0 if decodes else capacity.tokens - rows
                    for row in rng.sample(range(rows), rows):
                        taken = min(left, rng.randint(0, capacity.positions - 1))
                        lengths[row] += taken
                        left -= taken
                    kv_lengths = np.array([rng.randint(int(n), capacity.positions) for n in lengths], np.int32)
                    host = _host_rows(lengths, kv_lengths, limits.page_size)
                    asked = kernel.asks(host, spaces)
                    if asked is not None:
                        assert asked.int_bytes <= int_bytes and asked.float_bytes <= float_bytes
                    kernel.plan(host, spaces)  # raises where a workspace overflows
                    torch.cuda.synchronize()


SLEEP_CYCLES = 200_000_000
"""About a tenth of a second."""


def queued_behind_a_slow_kernel(owner: FlashInferOwner, rows: list[PagedRows]) -> tuple[list[torch.Tensor], float]:
    """Outputs of all `rows`, and the seconds that the host took to plan the first two while the device slept."""
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    started = time.perf_counter()
    outputs = [step.attended_by(owner) for step in rows[:2]]
    host_s = time.perf_counter() - started
    outputs += [step.attended_by(owner) for step in rows[2:]]
    torch.cuda.synchronize()
    return outputs, host_s


@by_kernel_and_page_size
def test_plans_queued_behind_a_slow_kernel_do_not_wait_and_do_not_overwrite_each_other(
    decode: DecodeKernel, group: int, head_dim: int, page_size: int, record_property
) -> None:
    owner = bound(decode, group, Limits(8, 512, 2048, page_size), head_dim)
    lengths = [([1] * 8, [100 * (n + 1) + row for row in range(8)], 8) for n in range(3)]
    lengths.append(([1, 1, 300, 64], [900, 30, 1800, 64], 2))
    rows = [PagedRows.drawn(owner.capacity, *step, seed=seed) for seed, step in enumerate(lengths)]
    for step in rows:  # whatever is done once only
        step.assert_right(step.attended_by(owner))
    started = time.perf_counter()
    torch.cuda._sleep(SLEEP_CYCLES)
    torch.cuda.synchronize()
    sleep_s = time.perf_counter() - started
    outputs, host_s = queued_behind_a_slow_kernel(owner, rows)
    for step, out in zip(rows, outputs, strict=True):
        step.assert_right(out)
    record_property("host_ms_of_two_steps", host_s * 1e3)
    record_property("slow_kernel_ms", sleep_s * 1e3)
    assert host_s < sleep_s / 2, "planning waited for the device"


@by_kernel_and_page_size
def test_the_fences_are_what_keeps_queued_plans_apart(
    decode: DecodeKernel, group: int, head_dim: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = bound(decode, group, Limits(8, 512, 2048, page_size), head_dim)
    # steps alike but for their pages, so that another step's arrays are wrong and yet within the cache
    lengths = [1] * 8, [100 + 16 * row for row in range(8)], 8
    pool = max(200, 3200 // page_size)
    rows = [PagedRows.drawn(owner.capacity, *lengths, seed=seed, pool_pages=pool) for seed in range(4)]
    for step in rows:
        step.assert_right(step.attended_by(owner))
    for staging in owner._staging.sets:
        monkeypatch.setattr(staging, "wait", lambda: None)
    broken, _ = queued_behind_a_slow_kernel(owner, rows)
    assert not all(
        bool(out.isfinite().all()) and step.worst_error(out) < 0.1 for step, out in zip(rows, broken, strict=True)
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA devices")
def test_the_fences_are_in_the_stream_of_the_buffers_device() -> None:
    path = untimed_path(PAGED_PREFILL)
    capacity = capacity_here(path, 5, 2, 128, Limits(8, 512, 2048, 16))
    owner = path.bind(capacity, path.layout(capacity).allocate("cuda:1"))
    batch = batch_of(capacity, [1] * 8, [100] * 8)
    owner.update(batch)
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        torch.cuda._sleep(SLEEP_CYCLES)
    assert torch.cuda.current_device() == 0
    started = time.perf_counter()
    owner.update(batch)
    owner.update(batch)
    two_s = time.perf_counter() - started
    owner.update(batch)  # its set is still to be read by the device that sleeps
    three_s = time.perf_counter() - started
    assert two_s < 0.02 < three_s


GRAPH_SHAPES = [
    *(
        (kernel, group, head_dim)
        for kernel in (PAGED_PREFILL, SPLIT_KV)
        for group, head_dim in ((4, 128), (5, 128), (6, 256), (7, 64))
    ),
    *((COMPILED, group, head_dim) for group, head_dim in ((4, 64), (4, 128), (6, 256))),
]


class CapturedSteps:
    """Decode steps captured once for each bucket, over one cache whose last page is that of padding rows."""

    def __init__(self, owner: FlashInferOwner, buckets: tuple[int, ...]) -> None:
        capacity = owner.capacity
        self.owner, self.buckets, self.context = owner, buckets, capacity.positions
        self._page_size = capacity.limits.page_size
        most = max(buckets)
        self._padding_page = most * self.context // self._page_size
        self._pages = np.random.default_rng(1).permutation(self._padding_page).reshape(most, -1).tolist()

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

        heads = (capacity.kv_heads, capacity.head_dim)
        self._cache = [empty(self._padding_page + 1, self._page_size, *heads) for _ in range(2)]
        self._query = empty(most, capacity.query_heads, capacity.head_dim)
        self._new = [empty(most, *heads) for _ in range(2)]
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        for bucket in sorted(buckets, reverse=True):
            self.prepare(bucket, max(1, bucket - 1), 40, 0)
            self._run(bucket)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = self._run(bucket)
            owner.note_capture()
            self._captured[bucket] = graph, out

    def prepare(self, bucket: int, live: int, length: int, seed: int) -> PagedRows:
        """The step of `live` rows of about `length` tokens and padding rows, planned and in the static buffers."""
        lengths = [min(self.context, length + 37 * row) for row in range(live)]
        held = [row[: -(-n // self._page_size)] for row, n in zip(self._pages, lengths, strict=False)]
        padding = bucket - live
        rows = PagedRows.drawn(
            self.owner.capacity,
            [1] * bucket,
            lengths + [1] * padding,
            bucket,
            seed,
            pages=held + [[self._padding_page]] * padding,
            pool_pages=self._padding_page,
        )
        for ours, theirs in zip(self._cache, (rows.cache_keys, rows.cache_values), strict=True):
            ours.copy_(theirs)
        self._query[:bucket].copy_(rows.query)
        for ours, theirs in zip(self._new, rows.new, strict=True):
            ours[:bucket].copy_(theirs)
        self.owner.update(rows.batch)
        return rows

    def assert_right(self, lengths: tuple[int, ...]) -> float:
        """Replays of all buckets, with and without padding rows, are right and as eager; returns the worst error."""
        errors = []
        for number, length in enumerate(lengths):
            for bucket in self.buckets if number % 2 else reversed(self.buckets):
                live = max(1, bucket - number % 4)
                rows = self.prepare(bucket, live, length, number)
                graph, out = self._captured[bucket]
                graph.replay()
                torch.cuda.synchronize()
                live_rows = attrs.evolve(
                    rows,
                    batch=attrs.evolve(rows.batch, query_lengths=[1] * live, kv_lengths=rows.batch.kv_lengths[:live]),
                    query=rows.query[:live],
                    keys=rows.keys[:live],
                    values=rows.values[:live],
                )
                errors.append(live_rows.assert_right(out[:live]))
                replayed = out[:live].clone()
                graph.replay()
                assert torch.equal(out[:live], replayed), "two replays of one plan differ"
                assert torch.equal(self._run(bucket)[:live], replayed), "a replay and an eager run of one plan differ"
        return max(errors)

    def _run(self, bucket: int) -> torch.Tensor:
        self.owner.append(self._new[0][:bucket], self._new[1][:bucket], *self._cache)
        return self.owner.attend(self._query[:bucket], *self._cache)


@pytest.mark.parametrize(("decode", "group", "head_dim"), GRAPH_SHAPES, ids=str)
def test_graphs_captured_once_per_bucket_stay_right_as_contexts_grow(
    decode: DecodeKernel, group: int, head_dim: int, record_property
) -> None:
    owner = bound(decode, group, Limits(8, 64, 8192, 16), head_dim)
    steps = CapturedSteps(owner, (4, 8))
    pointers = owner.buffers.pointers()
    record_property("worst_error", steps.assert_right((1, 15, 16, 17, 100, 513, 2000, 4096, 6000, steps.context)))
    assert owner.buffers.pointers() == pointers
    # the plan of a bucket that would not replay is refused
    captures = owner._captures._keys
    captures[4] = (*captures[4][:-1], captures[4][-1] + 1)
    steps.prepare(8, 7, 100, 0)
    with pytest.raises(PlanMismatch, match="4 rows"):
        steps.prepare(4, 3, 100, 0)


@pytest.mark.parametrize(("group", "head_dim"), FEW_ROWS)
def test_graphs_on_both_sides_of_every_threshold_of_few_rows_stay_right_as_contexts_grow(
    group: int, head_dim: int, record_property
) -> None:
    """One owner captures all buckets on the kernels that the committed table gives each, as a runtime does."""
    few = few_rows_here(group, head_dim)
    path = served_path(group, 2, head_dim)
    buckets = tuple(sorted({each.rows + beyond for each in few for beyond in (0, 1)}))
    owner = bound_owner(path, capacity_here(path, group, 2, head_dim, Limits(buckets[-1], 64, 32768, 16)))
    steps = CapturedSteps(owner, buckets)
    pointers = owner.buffers.pointers()
    record_property("worst_error", steps.assert_right((1, 17, 513, 4096, 20001, steps.context)))
    assert owner.buffers.pointers() == pointers


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_compiled_groups_are_probed_and_the_committed_record_agrees(head_dim: int, record_property) -> None:
    probed = probe.compiled_groups("bfloat16", head_dim)
    record_property("compiled_groups", str(probed))
    recorded = FlashInferPath(COMPILED).speeds.of(device_here(), head_dim)
    if recorded is None:
        pytest.skip(f"no probe of {device_here().name} is committed")
    assert probed == recorded.compiled_groups


@pytest.mark.parametrize("group", [4, 5, 6, 7])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_served_shape_selects_a_flashinfer_path_with_a_reason(group: int, head_dim: int, record_property) -> None:
    need = PathRequest(geometry(group, 2, head_dim), device_here(), "bfloat16", "tuned", 16)
    selection = select_path(standard_paths(), need)
    record_property("verdicts", str([(name, verdict.reason) for name, verdict in selection.verdicts]))
    assert selection.path.backend == "flashinfer"
    if selection.path.name == "flashinfer-decode":
        assert "is compiled for group size" in selection.reason


@pytest.mark.parametrize("group", [4, 5, 6, 7])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_pinned_policy_selects_the_path_whose_bits_do_not_depend_on_the_batch(group: int, head_dim: int) -> None:
    need = PathRequest(geometry(group, 2, head_dim), device_here(), "bfloat16", "pinned", 16)
    selection = select_path(standard_paths(), need)
    assert selection.path.name == "split-kv-pinned"
    assert "no result depends on the batch" in selection.reason


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"attention": geometry(4, 2, 96)}], ids=str)
def test_what_is_not_served_is_refused_when_the_backend_is_named(changes: dict[str, object]) -> None:
    need = PathRequest(geometry(4, 2, 128), device_here(), "bfloat16", "tuned", 16, "flashinfer")
    with pytest.raises(ConfigError, match="no decode path of backend 'flashinfer'"):
        select_path(standard_paths(), attrs.evolve(need, **changes))
