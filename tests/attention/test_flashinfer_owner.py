"""The FlashInfer owner apart from the library: what it writes, plans, refuses and waits for. No GPU needed."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from tests.support.attention import Contexts, batch_of, geometry, random_lengths
from tests.support.flashinfer import NoFence, flashinfer_capacity, torch_owner, unpinned

from trivet.attention import Replan, StepBatch
from trivet.attention.flashinfer.bounds import Workspace
from trivet.attention.flashinfer.captures import PlanMismatch
from trivet.attention.flashinfer.kinds import DecodeKernel
from trivet.attention.flashinfer.owner import FlashInferOwner
from trivet.attention.flashinfer.paths import FlashInferPath
from trivet.capacity import Limits, PlanCapacity
from trivet.errors import CapacityExceeded, ConfigError, RuntimeDown

PATHS = [*map(FlashInferPath, DecodeKernel), FlashInferPath(DecodeKernel.SPLIT_KV, pinned=True)]
by_path = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)


def small(path: FlashInferPath, group: int = 5) -> PlanCapacity:
    return flashinfer_capacity(geometry(group, 2), Limits(4, 24, 40, 4), path)


def mixed(batch: StepBatch, decode_rows: int) -> StepBatch:
    return attrs.evolve(batch, decode_rows=decode_rows)


@by_path
@pytest.mark.parametrize("seed", range(8))
def test_index_arrays_describe_pure_decode_prefill_and_mixed_steps(path: FlashInferPath, seed: int) -> None:
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    capacity = small(path, int(rng.integers(1, 8)))
    owner = torch_owner(capacity, path)
    for kind in ("decode", "prefill", "mixed"):
        query_lengths, kv_lengths = random_lengths(rng, capacity)
        decodes = {"decode": len(kv_lengths), "prefill": 0, "mixed": int(rng.integers(0, len(kv_lengths)))}[kind]
        query_lengths[:decodes] = [1] * decodes
        batch = mixed(batch_of(capacity, query_lengths, kv_lengths), decodes)
        if not batch.tokens or batch.tokens > capacity.tokens:
            continue
        contexts = Contexts.drawn(capacity, batch, generator)
        query = torch.randn(batch.tokens, capacity.query_heads, capacity.head_dim, generator=generator)
        assert owner.update(batch) is Replan.REPLANNED
        first = batch.kv_lengths - batch.query_lengths
        expected = [p for row, n in zip(first, batch.query_lengths, strict=True) for p in range(row, row + n)]
        assert owner.positions.tolist() == expected
        owner.append(*contexts.new(batch), contexts.cache_keys, contexts.cache_values)
        attended = owner.attend(query, contexts.cache_keys.nan_to_num(), contexts.cache_values.nan_to_num())
        torch.testing.assert_close(attended.double(), contexts.attended(batch, query), atol=1e-5, rtol=1e-5)


@by_path
def test_rows_are_decode_rows_by_their_kind_and_not_by_their_length(path: FlashInferPath) -> None:
    owner = torch_owner(small(path), path)
    lengths = [1, 1, 1], [9, 7, 5]
    owner.update(mixed(batch_of(owner.capacity, *lengths), 1))
    assert owner._kernels.decode.served == [1] and owner._kernels.chunks.served == [2]
    with pytest.raises(ConfigError, match="expected exactly 1 each"):
        owner.update(mixed(batch_of(owner.capacity, [2, 1], [9, 7]), 1))


@by_path
def test_one_element_fewer_in_any_index_buffer_raises_naming_it(path: FlashInferPath) -> None:
    capacity = flashinfer_capacity(geometry(3, 1), Limits(3, 6, 8, 4), path)
    full = [2, 2, 2], [8, 8, 8]
    layout = path.layout(capacity)
    names = [spec.name for spec in layout.specs if spec.dtype == "int32"]
    assert len(names) == (19 if path.decode is DecodeKernel.PAGED_PREFILL else 18)
    for name in names:
        owner = torch_owner(capacity, path, unpinned(layout.with_elements(name, layout.spec(name).elements - 1)))
        decode = batch_of(capacity, [1, 1, 1], full[1])
        batches = [mixed(decode, 3)] if name == "decode_indptr" else [batch_of(capacity, *full)]
        for batch in batches:
            with pytest.raises(CapacityExceeded, match=name.split(".")[0]):
                owner.update(batch)


@by_path
@pytest.mark.parametrize("name", ["decode_workspace", "chunk_workspace", "float_workspace"])
def test_a_workspace_smaller_than_what_the_library_asks_for_is_refused_at_bind(
    path: FlashInferPath, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = small(path)
    layout = path.layout(capacity)
    held = layout.spec(name).bytes
    asked = Workspace(held + 1, 0) if name == "float_workspace" else Workspace(0, held + 1)
    other = Workspace(0, 0)
    wanted = {
        "decode_workspace": (asked, other),
        "chunk_workspace": (other, asked),
        "float_workspace": (other, asked),
    }[name]
    owner = torch_owner(capacity, path)
    owner._kernels.decode.asked, owner._kernels.chunks.asked = wanted
    with pytest.raises(CapacityExceeded, match=name) as raised:
        FlashInferOwner(capacity, unpinned(layout), owner._kernels, fence=NoFence)
    assert (raised.value.requested, raised.value.bound) == (held + 1, held)


@by_path
def test_staging_shorter_than_the_workspace_it_is_copied_to_is_refused_at_bind(path: FlashInferPath) -> None:
    capacity = small(path)
    layout = path.layout(capacity)
    for name in [spec.name for spec in layout.specs if spec.pinned and spec.dtype == "uint8"]:
        shorter = layout.with_elements(name, layout.spec(name).elements - 1)
        with pytest.raises(CapacityExceeded, match=name.split(".")[0]):
            torch_owner(capacity, path, unpinned(shorter))


@by_path
def test_pointers_do_not_move_over_a_hundred_random_updates(path: FlashInferPath) -> None:
    rng = np.random.default_rng(4)
    owner = torch_owner(small(path), path)
    pointers = owner.buffers.pointers()
    for _ in range(100):
        owner.update(batch_of(owner.capacity, *random_lengths(rng, owner.capacity)))
        assert owner.buffers.pointers() == pointers


CAPACITY_LIMITS = Limits(2, 8, 12, 4)


@by_path
@pytest.mark.parametrize(
    ("dimension", "query_lengths", "kv_lengths", "changes"),
    [
        ("requests", [1, 1, 1], [1, 1, 1], {}),
        ("tokens", [5, 4], [5, 4], {}),
        ("positions", [1], [13], {}),
        ("query_heads", [1, 1], [12, 12], {"query_heads": 7}),
        ("kv_heads", [1, 1], [12, 12], {"kv_heads": 3}),
        ("pages_per_request", [1, 1], [12, 12], {"page_indptr": [0, 4], "page_indices": [0, 1, 2, 3]}),
        ("pages", [1, 1], [12, 12], {"page_indptr": [0, 3, 6], "page_indices": list(range(7))}),
        ("indptr", [1, 1], [12, 12], {"page_indptr": [0, 3, 6, 6]}),
    ],
)
def test_one_past_a_dimension_raises_with_its_name_and_writes_nothing(
    path: FlashInferPath, dimension: str, query_lengths: list[int], kv_lengths: list[int], changes: dict[str, object]
) -> None:
    capacity = flashinfer_capacity(geometry(3, 2), CAPACITY_LIMITS, path)
    owner = torch_owner(capacity, path)
    owner.update(batch_of(capacity, [2], [7]))
    before = {name: owner.buffers[name].clone() for name in owner.buffers.pointers()}
    batch = attrs.evolve(batch_of(capacity, query_lengths, kv_lengths), **changes)
    with pytest.raises(CapacityExceeded) as raised:
        owner.update(batch)
    assert raised.value.dimension == dimension
    assert raised.value.requested == raised.value.bound + 1
    assert all(torch.equal(before[name], owner.buffers[name]) for name in before), "a refused update wrote"
    assert owner.positions.tolist() == [5, 6], "the plan in place is still the one before"


@by_path
def test_more_tiles_than_the_capacity_raise_with_that_name(path: FlashInferPath) -> None:
    capacity = flashinfer_capacity(geometry(4, 1), Limits(2, 16, 16, 4), path)
    owner = torch_owner(capacity, path)
    worst = batch_of(capacity, [1 + 3 * 4, 3], [16, 16])
    object.__setattr__(capacity, "tiles", 4)
    with pytest.raises(CapacityExceeded, match="tiles"):
        owner.update(worst)


@by_path
def test_a_decode_step_planned_otherwise_than_its_capture_raises_instead_of_replaying(path: FlashInferPath) -> None:
    owner = torch_owner(small(path), path)
    of_rows = {n: mixed(batch_of(owner.capacity, [1] * n, [9] * n), n) for n in (1, 2)}
    owner.update(of_rows[2])
    owner.note_capture()
    owner.update(of_rows[2])
    owner._kernels.decode.key = (1, 2, 4)
    owner.update(of_rows[1])
    owner.update(mixed(batch_of(owner.capacity, [1, 1, 3], [9, 9, 9]), 2))
    with pytest.raises(PlanMismatch, match="2 rows"):
        owner.update(of_rows[2])
    with pytest.raises(ConfigError, match="no plan"):
        owner.attend(torch.zeros(2, 10, 16), torch.zeros(6, 4, 2, 16), torch.zeros(6, 4, 2, 16))


@by_path
def test_only_pure_decode_steps_count_as_captured(path: FlashInferPath) -> None:
    owner = torch_owner(small(path), path)
    owner.update(mixed(batch_of(owner.capacity, [1, 2], [9, 9]), 1))
    with pytest.raises(ConfigError, match="pure decode"):
        owner.note_capture()


@by_path
def test_a_staging_set_is_waited_for_before_it_is_written_again(path: FlashInferPath) -> None:
    fences: list[NoFence] = []
    owner = torch_owner(small(path), path, fences=fences)
    for length in range(5, 10):
        owner.update(batch_of(owner.capacity, [1], [length]))
    # binding, and five updates over two sets: each waits for the copies of the one two before it
    assert [fence.recorded for fence in fences] == [4, 2]
    assert [fence.waits for fence in fences] == [[1, 2, 3], [0, 1]]


@by_path
def test_attending_or_appending_a_step_that_was_not_planned_is_refused(path: FlashInferPath) -> None:
    owner = torch_owner(small(path), path)
    cache = torch.zeros(4, 4, 2, 16)
    with pytest.raises(ConfigError, match="update it first"):
        owner.attend(torch.zeros(3, 10, 16), cache, cache)
    owner.update(batch_of(owner.capacity, [2], [2]))
    with pytest.raises(ConfigError, match="update it first"):
        owner.attend(torch.zeros(3, 10, 16), cache, cache)
    with pytest.raises(ConfigError, match="update it first"):
        owner.append(torch.zeros(3, 2, 16), torch.zeros(3, 2, 16), cache, cache)


@by_path
def test_a_closed_owner_says_so(path: FlashInferPath) -> None:
    owner = torch_owner(small(path), path)
    owner.close()
    owner.close()
    with pytest.raises(RuntimeDown, match="closed"):
        owner.update(batch_of(owner.capacity, [1], [1]))


def test_long_chunks_run_on_the_hopper_kernel_and_short_ones_do_not() -> None:
    path = FlashInferPath(DecodeKernel.PAGED_PREFILL)
    capacity = flashinfer_capacity(geometry(5, 1, 128), Limits(4, 4096, 4096, 16), path)
    least = path.choice(capacity).hopper_from
    assert least is not None and least.total_tokens > least.average_tokens > 1
    owner = torch_owner(capacity, path)
    assert owner._kernels.long_chunks is not None
    average, total = least.average_tokens, least.total_tokens
    for lengths, long in (
        ([total], True),
        ([total - 1], False),
        ([average] * 4, True),
        ([average] * 3 + [average - 1], False),
    ):
        owner._kernels.long_chunks.served.clear()
        owner._kernels.chunks.served.clear()
        owner.update(batch_of(capacity, lengths, lengths))
        assert owner._kernels.long_chunks.served == ([len(lengths)] if long else [])
        assert owner._kernels.chunks.served == ([] if long else [len(lengths)])


@by_path
def test_a_kernel_that_cannot_tell_its_workspace_plans_the_worst_steps_at_bind(path: FlashInferPath) -> None:
    capacity = small(path)
    owner = torch_owner(capacity, path)
    owner._kernels.chunks.asked = None
    FlashInferOwner(capacity, unpinned(path.layout(capacity)), owner._kernels, fence=NoFence)
    assert {1, capacity.requests} <= set(owner._kernels.chunks.served)


@by_path
def test_closing_waits_until_the_device_has_read_the_pinned_memory(path: FlashInferPath) -> None:
    fences: list[NoFence] = []
    owner = torch_owner(small(path), path, fences=fences)
    owner.update(batch_of(owner.capacity, [1], [5]))
    owner.close()
    assert [fence.waits[-1] for fence in fences] == [fence.recorded for fence in fences]
