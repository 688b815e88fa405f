"""``trivet bench generate --kernels`` on a device: whole decode steps, and all of their time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gpu import test_qwen3_on_cuda as dense

from trivet.bench.generate import GenerateSettings, bench_generate
from trivet.bench.kernels import DECIMALS
from trivet.bench.profiling import MARK, PROFILED_STEPS

COPIES = ("Mem", "mem")
"""How the names of copies begin, of which a step has as many as its plan has changed in."""


def test_a_breakdown_is_of_whole_replayed_steps_and_adds_up_to_their_time(tmp_path: Path) -> None:
    directory = dense.make(tmp_path, 5, 128)
    load = {"device": "cuda", "dtype": "bfloat16", "kv_pages": 512}
    settings = GenerateSettings(str(directory), (1, 3), 40, 8, 1, 0, 1, (300,), (), True, 0, load)
    said: list[str] = []
    one, three, prompt = bench_generate(settings, said.append)["kernels"]
    for entry in (one, three):
        assert entry["steps"] == entry["graph_steps"] == PROFILED_STEPS
        computed = [kernel for kernel in entry["kernels"] if not kernel["name"].startswith(COPIES)]
        assert computed and all(kernel["count"] % PROFILED_STEPS == 0 for kernel in computed), computed
    assert prompt["steps"] == 1 and prompt["span_us"] < prompt["seconds"] * 1e6
    for entry in (one, three, prompt):
        assert_adds_up(entry)
    assert sum("device idle" in text for text in said) == 3


def assert_adds_up(entry: dict[str, Any]) -> None:
    """The times of `entry`, each rounded, add up, and the marks are not among its kernels."""
    times = [kernel["total_us"] for kernel in entry["kernels"]]
    rounding_us = (len(times) + 2) * 0.5 * 10**-DECIMALS
    assert sum(times) + entry["idle_us"] == pytest.approx(entry["span_us"], abs=rounding_us + 1e-6)
    assert 0 <= entry["idle_us"] < entry["span_us"] and min(times) >= 0
    assert not any(MARK in kernel["name"] for kernel in entry["kernels"])
