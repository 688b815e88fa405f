"""The ledger tells the truth: owned lines equal live storages, and planning needs config.json alone."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.checkpoints import make_qwen3, make_qwen35

import trivet
from trivet.layout import BufferLayout, BufferSpec
from trivet.reservation import KV_LINE, LedgerLine, reserve

LIMITS = trivet.Limits(max_requests=3, max_step_tokens=40, max_context=96, page_size=4)


@pytest.fixture(params=["qwen3", "qwen3.5"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (make_qwen3 if request.param == "qwen3" else make_qwen35)(tmp_path)
    return tmp_path


def test_every_owned_line_equals_the_bytes_of_the_storages_behind_it(checkpoint: Path) -> None:
    with trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        owned = runtime._engine.owned
        assert {line.name for line in runtime.memory.items if line.owned} == set(owned)
        for line in runtime.memory.items:
            if line.owned:
                assert owned[line.name].storage_bytes == line.bytes, line.name
        assert sum(line.bytes for line in runtime.memory.items) == runtime.memory.total_bytes


def test_planning_from_config_alone_gives_the_ledger_of_a_loaded_runtime(checkpoint: Path) -> None:
    with trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        loaded = runtime.memory
    for weights in checkpoint.glob("*.safetensors*"):
        weights.unlink()
    planned = trivet.plan_memory(checkpoint, device="cpu", limits=LIMITS)
    assert planned.items == loaded.items
    assert planned.kv_pages == loaded.kv_pages


def test_planning_imports_no_torch(checkpoint: Path) -> None:
    code = (
        "import sys, trivet; ledger = trivet.plan_memory(sys.argv[1], device='h200');"
        "assert ledger.total_bytes > 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(checkpoint)], check=True)


def test_the_profile_stays_within_the_planned_bound_and_names_a_family_that_does_not(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trivet.runtime import load

    seen = []
    original = load.run_profile
    monkeypatch.setattr(load, "run_profile", lambda *args: seen.append(original(*args)) or seen[-1])
    with trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        bound = runtime.memory.line("activations").bytes
    assert 0 < seen[0].peak_bytes <= bound
    monkeypatch.setattr(load, "run_profile", lambda *args: original(*args[:-1], seen[0].peak_bytes - 1))
    with pytest.raises(trivet.PluginError, match="planned bound"):
        trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS, autostart=False)


def test_one_capacity_object_is_held_by_profile_reserve_owners_and_blueprint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trivet.runtime import load

    profiled = []
    original = load.run_profile
    monkeypatch.setattr(load, "run_profile", lambda *args: profiled.append(args[0]) or original(*args))
    with trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        engine = runtime._engine
        capacity = engine.blueprint.capacity
        assert profiled[0] is capacity
        for attention, owner in engine.owners.items():
            assert owner.capacity is capacity.plan(attention)
        assert engine.scheduler.limits is capacity.limits
        assert engine.scheduler.gate.limits is capacity.limits


def test_the_wider_the_limits_the_more_the_activations(checkpoint: Path) -> None:
    small = trivet.plan_memory(checkpoint, limits=LIMITS).line("activations").bytes
    large = trivet.plan_memory(checkpoint, limits=trivet.Limits(3, 96, 96, 4)).line("activations").bytes
    assert large > small


def test_too_small_a_budget_prints_the_ledger_and_says_what_to_lower(checkpoint: Path) -> None:
    lines = trivet.plan_memory(checkpoint, limits=LIMITS).items
    fixed_bytes = sum(line.bytes for line in lines if not line.lower)
    for fits, advice in ((True, "lower max_step_tokens"), (False, "since no limit changes")):
        memory_bytes = int(fixed_bytes / 0.9 * (1.1 if fits else 0.9))
        with pytest.raises(trivet.MemoryBudgetError) as raised:
            trivet.plan_memory(checkpoint, device_memory_bytes=memory_bytes, limits=LIMITS)
        assert advice in str(raised.value)
        assert all(line.name in str(raised.value) for line in lines)


def kv_layout_of(pages: int) -> BufferLayout:
    return BufferLayout("kv", (BufferSpec("keys", (pages + 1) * 100, "float32"),))


@pytest.mark.parametrize("left_pages", [1, 2, 7])
def test_pages_take_exactly_what_the_budget_leaves(left_pages: int) -> None:
    lines = [LedgerLine("weights", 1000, "test")]
    exact = 1000 + (left_pages + 1) * 400
    for budget, pages in ((exact, left_pages), (exact + 399, left_pages)):
        ledger = reserve(lines, kv_layout_of, budget_bytes=budget, kv_pages=None, most_pages=None)
        assert ledger.kv_pages == pages
        assert ledger.line(KV_LINE).bytes == (pages + 1) * 400
    with pytest.raises(trivet.MemoryBudgetError, match="1 bytes too"):
        reserve(lines, kv_layout_of, budget_bytes=1000 + 799, kv_pages=None, most_pages=None)


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_the_lines_of_recurrent_state_say_the_bytes_of_one_and_where_the_number_comes_from(
    device: str, tmp_path: Path
) -> None:
    make_qwen35(tmp_path)

    def lines(memory_bytes: int, **settings: int) -> tuple[LedgerLine, LedgerLine]:
        plan = trivet.plan_memory(tmp_path, device=device, device_memory_bytes=memory_bytes, limits=LIMITS, **settings)
        return plan.line("recurrent state"), plan.line("snapshots")

    ample, fixed = 8 * 2**30, trivet.plan_memory(tmp_path, device=device, limits=LIMITS, snapshot_bytes=0)
    fixed_bytes = sum(line.bytes for line in fixed.items if line.name != KV_LINE)
    state, snapshots = lines(ample, snapshot_stride=8)
    one = state.bytes // (LIMITS.max_requests + 1)
    assert state.source == f"{LIMITS.max_requests} slots of {one} bytes, and {one} bytes for padding rows"
    wanted = 8 * LIMITS.max_requests + 32
    assert snapshots.bytes == wanted * one
    assert snapshots.source == (
        f"{wanted} snapshots of {one} bytes, 8 for each of {LIMITS.max_requests} requests and 32 more, "
        "at multiples of 8 tokens"
    )
    given = 5 * one + one // 2
    _, snapshots = lines(ample, snapshot_stride=8, snapshot_bytes=given)
    assert snapshots.bytes == 5 * one
    assert snapshots.source == (
        f"5 snapshots of {one} bytes, as many as {given} bytes hold (snapshot_bytes), at multiples of 8 tokens"
    )
    tight = math.ceil((fixed_bytes + 41 * one) / 0.9)
    _, snapshots = lines(tight, snapshot_stride=8)
    found = re.fullmatch(
        rf"(\d+) snapshots of {one} bytes, as many as (\d+) bytes hold \(1/4 of what is left of the memory budget\), "
        "at multiples of 8 tokens",
        snapshots.source,
    )
    assert found is not None, snapshots.source
    count, share = int(found[1]), int(found[2])
    assert count == 10 == share // one and snapshots.bytes == count * one
    assert lines(ample, snapshot_stride=8, snapshot_bytes=0)[1].source == (
        f"hybrid prefix caching is off: snapshot_bytes is 0 bytes, and one snapshot of the recurrent state takes {one}"
    )


def test_explicit_pages_that_do_not_fit_are_refused() -> None:
    lines = [LedgerLine("weights", 1000, "test")]
    with pytest.raises(trivet.MemoryBudgetError, match="lower kv_pages"):
        reserve(lines, kv_layout_of, budget_bytes=5000, kv_pages=10, most_pages=None)


def test_a_refused_number_of_pages_is_what_the_message_names() -> None:
    with pytest.raises(trivet.MemoryBudgetError, match="kv_pages=10"):
        reserve([], kv_layout_of, budget_bytes=4399, kv_pages=10, most_pages=None)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("kv_pages", 2**31 - 1), ("kv_pages", 2**62), ("snapshot_bytes", 2**63), ("snapshot_bytes", 2**70)],
)
def test_an_argument_that_no_memory_could_serve_is_refused_by_its_name(
    argument: str, value: int, tmp_path: Path
) -> None:
    make_qwen35(tmp_path)
    with pytest.raises(trivet.CapacityExceeded, match=f"lower {argument}") as refused:
        trivet.plan_memory(tmp_path, device="h200", limits=LIMITS, snapshot_stride=8, **{argument: value})
    assert (refused.value.dimension, refused.value.requested) == (argument, value)


def test_as_many_pages_as_kernels_count_are_planned_and_may_be_asked_for() -> None:
    most = reserve([], kv_layout_of, budget_bytes=2**60, kv_pages=None, most_pages=None).kv_pages
    assert reserve([], kv_layout_of, budget_bytes=2**60, kv_pages=most, most_pages=None).kv_pages == most
    with pytest.raises(trivet.CapacityExceeded):
        reserve([], kv_layout_of, budget_bytes=2**60, kv_pages=most + 1, most_pages=None)


def test_a_model_whose_pages_take_no_memory_has_as_many_as_its_requests_can_list(tmp_path: Path) -> None:
    make_qwen35(tmp_path, num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    for device in ("cpu", "h200"):
        planned = trivet.plan_memory(tmp_path, device=device, limits=LIMITS)
        assert planned.kv_pages == LIMITS.max_requests * LIMITS.max_context // LIMITS.page_size
        assert planned.line(KV_LINE).bytes == 0


def test_the_command_line_prints_the_same_ledger(checkpoint: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-m", "trivet", "memory", str(checkpoint), "--device-memory", "8GiB", "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    printed = json.loads(out.stdout)
    planned = trivet.plan_memory(checkpoint, device_memory_bytes=8 * 2**30).as_json()
    assert {name: printed[name] for name in planned} == planned
    assert [item["name"] for item in printed["items"] if "weight" in item["name"]] == ["weights"]
