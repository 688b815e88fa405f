"""What the ledger says is owned is what lives, slots and snapshots included; config.json alone says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.qwen35.conftest import Group6
from tests.support.checkpoints import make_qwen35
from tests.support.multimodal import write_multimodal
from tests.support.positions import drawn, serve

import trivet

LINEAR, FULL = "linear_attention", "full_attention"
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one row": {"limits": trivet.Limits(1, 1, 1, 1)},
    "small pages": {"limits": trivet.Limits(5, 7, 100, 3), "kv_pages": 11},
    "wide steps": {"limits": trivet.Limits(2, 500, 64, 16)},
    "no snapshots": {"limits": trivet.Limits(3, 16, 64, 16), "snapshot_bytes": 0},
    "few snapshots": {"limits": trivet.Limits(3, 16, 64, 16), "snapshot_bytes": 50_000, "snapshot_stride": 32},
    "no prefix cache": {"limits": trivet.Limits(3, 16, 64, 16), "prefix_cache": False},
    "bfloat16": {"limits": trivet.Limits(3, 16, 64, 16), "dtype": "bfloat16"},
}
PATTERNS = {
    "all linear": [LINEAR, LINEAR],
    "all full": [FULL, FULL],
    "full first": [FULL, LINEAR, LINEAR],
}


def assert_lines_live(runtime: trivet.Runtime) -> None:
    """Each owned line has live buffers of exactly its bytes, and no live buffers lack a line."""
    ledger, owned = runtime.memory, runtime._engine.owned
    lines = {line.name: line.bytes for line in ledger.items if line.owned}
    assert lines == {name: buffers.storage_bytes for name, buffers in owned.items()}
    assert ledger.total_bytes == sum(line.bytes for line in ledger.items)
    addresses = [address for buffers in owned.values() for address in buffers.pointers().values() if address]
    assert len(set(addresses)) == len(addresses), "two lines count the same storage"


@pytest.mark.parametrize("name", SETTINGS)
def test_owned_lines_equal_live_storages_and_the_plan_for_both_forms_on_disk(
    name: str, group6: Group6, tmp_path: Path
) -> None:
    settings = SETTINGS[name]
    write_multimodal(group6.directory, tmp_path)
    with trivet.Runtime.load(group6.directory, device="cpu", autostart=False, **settings) as runtime:
        assert_lines_live(runtime)
        lines = {line.name: line.bytes for line in runtime.memory.items}
        total_bytes, kv_pages = runtime.memory.total_bytes, runtime.memory.kv_pages
        if name != "one row":
            serve(runtime, [drawn(np.random.default_rng(0), 29)], trivet.Sampling(max_new_tokens=4))
            assert_lines_live(runtime)
        engine, limits = runtime._engine, runtime._engine.blueprint.capacity.limits
        assert engine.state is not None
        for view in engine.state._slot_views.values():
            assert len(view) == limits.max_requests + 1
        for view in engine.state._snapshot_views.values():
            assert len(view) == runtime.stats()["snapshots_total"]
        for keys, values in (engine.cache.layer(layer) for layer in engine.blueprint.geometry.attention_layers):
            assert len(keys) == len(values) == kv_pages + 1
    for form in (group6.directory, tmp_path):
        alone = form / "alone" if form == tmp_path else tmp_path / "text"
        alone.mkdir()
        (alone / "config.json").write_text((form / "config.json").read_text())
        ledger = trivet.plan_memory(alone, **settings)
        assert {line.name: line.bytes for line in ledger.items} == lines
        assert (ledger.total_bytes, ledger.kv_pages) == (total_bytes, kv_pages)


@pytest.mark.parametrize("name", PATTERNS)
def test_layers_that_are_not_there_have_no_bytes(name: str, tmp_path: Path) -> None:
    kinds = PATTERNS[name]
    make_qwen35(tmp_path, layer_types=kinds, num_hidden_layers=len(kinds))
    limits = trivet.Limits(3, 16, 64, 16)
    with trivet.Runtime.load(tmp_path, device="cpu", limits=limits, autostart=False) as runtime:
        assert_lines_live(runtime)
        names = {line.name for line in runtime.memory.items}
        assert ("recurrent state" in names) == ("snapshots" in names) == (LINEAR in kinds)
        assert any(line.startswith("plan ") for line in names) == (FULL in kinds)
        assert any(line.startswith("rotary table ") for line in names) == (FULL in kinds)
        if FULL not in kinds:
            assert runtime.memory.line("KV pages").bytes == 0


def test_what_was_owned_is_gone_after_close(group6: Group6) -> None:
    runtime = trivet.Runtime.load(group6.directory, device="cpu", autostart=False)
    owned = dict(runtime._engine.owned)
    assert sum(buffers.storage_bytes for buffers in owned.values()) > 0
    runtime.close()
    assert sum(buffers.storage_bytes for buffers in owned.values()) == 0


def test_more_slots_and_snapshots_cost_exactly_their_bytes(group6: Group6) -> None:
    def lines(requests: int, snapshot_bytes: int) -> tuple[int, int]:
        ledger = trivet.plan_memory(
            group6.directory, limits=trivet.Limits(requests, 8, 64, 16), snapshot_bytes=snapshot_bytes
        )
        return ledger.line("recurrent state").bytes, ledger.line("snapshots").bytes

    one = lines(2, 0)[0] - lines(1, 0)[0]
    for requests in (1, 4, 9):
        assert lines(requests, 5 * one) == ((requests + 1) * one, 5 * one)


def test_planning_a_hybrid_model_s_memory_does_not_import_torch(group6: Group6) -> None:
    import subprocess
    import sys

    script = "import sys, trivet\ntrivet.plan_memory(sys.argv[1], device='h200')\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", script, str(group6.directory)], check=True, timeout=60)


def test_the_ledger_as_json_holds_the_state_lines(group6: Group6) -> None:
    shown = json.loads(json.dumps(trivet.plan_memory(group6.directory).as_json()))
    names = {item["name"] for item in shown["items"]}
    assert {"recurrent state", "snapshots"} <= names
    assert [item["name"] for item in shown["items"] if "weight" in item["name"]] == ["weights"]
