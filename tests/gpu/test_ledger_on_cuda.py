"""The ledger against the driver, with captured steps: their bounds, owned buffers, and the total without KV pages."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.test_qwen3_on_cuda import load, make

from trivet.reservation import GRAPHS_DRIVER_LINE, GRAPHS_LINE, KV_LINE
from trivet.reservation.cuda import CONTEXT_BYTES
from trivet.runtime.live import LiveMemory, serve_longest_step

TINY_SLACK_BYTES = CONTEXT_BYTES // 2
"""Bounds on context and graphs are those of large models, and a tiny one is little else: 1% of it would say nothing."""
QUIET_BYTES = 16 * 2**20
"""By so much the driver's figure may differ before and after, where nobody else is on the device."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 of group size 5."""
    return make(tmp_path_factory.mktemp("ledger"), 5, 128)


def test_owned_lines_are_exact_and_the_pool_of_captured_steps_is_within_its_line(directory: Path) -> None:
    gc.collect()  # graphs of earlier runtimes must not be freed while these are captured
    with load(directory, "flashinfer") as runtime:
        serve_longest_step(runtime)
        live = LiveMemory.of(runtime)
    assert not live.differing
    assert live.captured_bytes.keys() == {GRAPHS_LINE, GRAPHS_DRIVER_LINE}
    assert 0 < live.captured_bytes[GRAPHS_LINE] <= live.ledger.line(GRAPHS_LINE).bytes


def test_without_graphs_nothing_was_taken_for_them(directory: Path) -> None:
    with load(directory, "flashinfer", cuda_graphs=False) as runtime:
        assert LiveMemory.of(runtime).captured_bytes == {}


TINY = "--dtype bfloat16 --attention flashinfer --max-requests 6 --max-step-tokens 96 --max-context 512 --kv-pages 256"


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(None, TINY, id="tiny"),
        pytest.param("qwen3-14b", "--weights random --kv-pages 1000", id="qwen3-14b", marks=pytest.mark.slow),
    ],
)
def test_the_driver_takes_what_was_planned(model: str | None, options: str, directory: Path) -> None:
    """In a process of its own, so that nothing of other tests is counted."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("the driver's figures are of all processes on the device: run this file alone, without -n")
    others_bytes = taken_bytes()
    command = [sys.executable, "-m", "trivet", "memory", model or str(directory), "--live", "--json", *options.split()]
    done = subprocess.run([*command, "--device", "cuda"], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    if abs(taken_bytes() - others_bytes) > QUIET_BYTES:
        pytest.skip("another process took or gave back memory of the device meanwhile")
    shown: dict[str, Any] = json.loads(done.stdout)
    planned = {item["name"]: item["bytes"] for item in shown["items"]}
    live = shown["live"]
    assert 0 < live["captured_bytes"][GRAPHS_LINE] <= planned[GRAPHS_LINE]
    assert live["captured_bytes"][GRAPHS_DRIVER_LINE] <= planned[GRAPHS_DRIVER_LINE]
    assert "outside torch" not in done.stderr  # the warning about the driver's part
    assert live["owned_bytes"] == {name: size for name, size in planned.items() if name in live["owned_bytes"]}
    planned_bytes = live["without_kv"]["planned_bytes"]
    found_bytes = live["taken_bytes"] - others_bytes - planned[KV_LINE]
    slack_bytes = planned_bytes // 100 if model is not None else TINY_SLACK_BYTES
    assert planned_bytes - slack_bytes <= found_bytes <= planned_bytes


def taken_bytes() -> int:
    """What the driver says is taken of the device, by every process, this one included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes
