"""``bench decode`` on a CUDA device: an owned plan allocates nothing, a fresh one its arrays and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gpu.test_qwen3_on_cuda import load, make

from trivet.bench.arms import ArmName
from trivet.bench.decode import DecodeSettings, bench_decode

PAIRS, ITERATIONS, ROWS = 2, 4, 3
MOST_FILLS = 4
"""Kernels that make a FlashInfer layout ready: three workspaces of zeros, and the first tokens of decode rows."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 of group size 5."""
    return make(tmp_path_factory.mktemp("bench"), 5, 128)


def measured(directory: Path, attention: str, *arms: ArmName) -> tuple[dict[str, Any], str]:
    """The arms of the one batch that is measured, and what was printed."""
    limits = {"max_step_tokens": 96, "max_context": 512}
    sizes = {"kv_pages": 128, "limits": limits, "attention": attention, "dtype": "bfloat16", "device": "cuda"}
    printed: list[str] = []
    settings = DecodeSettings(str(directory), (ROWS,), 20, ITERATIONS, PAIRS, arms, 0, sizes)
    (batch,) = bench_decode(settings, printed.append)["batches"]
    return batch["arms"], "\n".join(printed)


def device_arrays(directory: Path, attention: str) -> int:
    """Arrays of the plan that torch allocates on the device."""
    with load(directory, attention, cuda_graphs=False) as runtime:
        (owner,) = runtime._engine.owners.values()
        return sum(spec.elements > 0 and not spec.pinned for spec in owner.buffers.layout.specs)


@pytest.mark.parametrize("attention", ["flashinfer", "reference"])
def test_an_owned_plan_allocates_nothing_and_a_fresh_one_its_device_arrays_alone(
    attention: str, directory: Path
) -> None:
    arms, printed = measured(directory, attention, "owned", "fresh")
    expected = device_arrays(directory, attention)
    assert expected > 0
    assert set(arms["owned"]["plan_allocations"]) == {0}
    assert set(arms["fresh"]["plan_allocations"]) == {expected}
    owned, fresh = (arms[name]["counts_per_step"] for name in ("owned", "fresh"))
    assert (owned["plan_allocations"], fresh["plan_allocations"]) == (0, expected)
    assert fresh["allocations"] - owned["allocations"] == pytest.approx(expected)
    assert owned["launches"] > 0 and owned["graph_launches"] == 0, "a step that replays has one plan"
    assert "plan allocations" in printed and "launches" in printed


def test_a_fresh_flashinfer_plan_launches_no_more_than_what_makes_its_buffers_ready(directory: Path) -> None:
    arms, _ = measured(directory, "flashinfer", "owned", "fresh")
    owned, fresh = (arms[name]["counts_per_step"] for name in ("owned", "fresh"))
    assert 0 <= fresh["kernels"] - owned["kernels"] <= MOST_FILLS


def test_a_whole_step_allocates_nothing_where_an_owned_plan_is_replayed(directory: Path) -> None:
    arms, _ = measured(directory, "flashinfer", "owned")
    counts = arms["owned"]["counts_per_step"]
    assert counts["graph_launches"] > 0
    assert (counts["allocations"], counts["plan_allocations"]) == (0, 0)
    assert set(arms["owned"]["plan_allocations"]) == {0}
    assert [pair["device_allocations"] for pair in arms["owned"]["pairs"]] == [0] * PAIRS
