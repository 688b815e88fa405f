"""What was planned for a CUDA device is shown beside what was taken, and captured steps are held to their lines."""

from __future__ import annotations

import logging

import pytest
from attrs import evolve

import trivet
from trivet.errors import MemoryBudgetError
from trivet.reservation import GRAPHS_DRIVER_LINE, GRAPHS_LINE, KV_LINE
from trivet.runtime.capture import Taken
from trivet.runtime.live import LiveMemory

LEDGER = trivet.plan_memory("qwen3-14b", device="h200")
POOL, DRIVER = LEDGER.line(GRAPHS_LINE).bytes, LEDGER.line(GRAPHS_DRIVER_LINE).bytes
PINNED_BYTES = 1000
WITHOUT_KV_BYTES = LEDGER.total_bytes - LEDGER.line(KV_LINE).bytes - PINNED_BYTES


def found(without_kv_bytes: int) -> LiveMemory:
    """Every owned line as planned, half of the graphs' bounds taken, and so much of the device beside KV pages."""
    return LiveMemory(
        LEDGER,
        owned_bytes={line.name: line.bytes for line in LEDGER.items if line.owned},
        pinned_bytes=PINNED_BYTES,
        allocated_bytes=1,
        taken_bytes=without_kv_bytes + LEDGER.line(KV_LINE).bytes,
        captured_bytes={GRAPHS_LINE: POOL // 2, GRAPHS_DRIVER_LINE: DRIVER // 2},
    )


def test_what_captured_steps_took_stands_beside_their_bounds() -> None:
    live = found(WITHOUT_KV_BYTES)
    rows = {row[:30].strip(): row.split()[-2:] for row in live.table().splitlines()}
    assert rows[GRAPHS_LINE] == [f"{POOL // 2 / 2**20:.2f}", "MiB"]
    assert rows[GRAPHS_DRIVER_LINE] == [f"{DRIVER // 2 / 2**20:.2f}", "MiB"]
    assert rows["CUDA context"] == ["a", "bound"]
    shown = live.as_json()["live"]
    assert isinstance(shown, dict)
    assert shown["captured_bytes"] == {GRAPHS_LINE: POOL // 2, GRAPHS_DRIVER_LINE: DRIVER // 2}
    assert "a bound" in evolve(live, captured_bytes={}).table().split(GRAPHS_DRIVER_LINE)[1].splitlines()[0]


@pytest.mark.parametrize(("part", "percent"), [(1.0, 0.0), (0.99, -1.0), (1.02, 2.0)])
def test_the_difference_from_the_driver_is_said_in_percent_of_the_plan(part: float, percent: float) -> None:
    live = found(round(WITHOUT_KV_BYTES * part))
    assert live.difference_percent == pytest.approx(percent, abs=1e-6)
    assert f"{percent:+.2f}%" in live.table()
    shown = live.as_json()["live"]
    assert isinstance(shown, dict)
    assert shown["without_kv"]["planned_bytes"] == WITHOUT_KV_BYTES
    assert shown["without_kv"]["difference_percent"] == pytest.approx(percent, abs=1e-6)


def test_without_a_driver_to_ask_nothing_is_said_of_it() -> None:
    with trivet.Runtime.load("tiny-qwen3", device="cpu", autostart=False, kv_pages=7) as runtime:
        live = LiveMemory.of(runtime)
    assert live.difference_percent is None and live.captured_bytes == {}
    assert "%" not in live.table() and not live.differing


def test_captured_steps_within_their_lines_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    Taken(POOL, DRIVER).check(LEDGER)
    assert not caplog.records


def test_a_pool_of_captured_steps_beyond_its_line_is_an_error_with_both_numbers() -> None:
    with pytest.raises(MemoryBudgetError, match=r"captured steps take .* MiB, more than the .* cuda_graphs=False"):
        Taken(POOL + 1, 0).check(LEDGER)


def test_what_the_device_lost_beyond_the_driver_s_line_is_a_warning_since_it_may_be_another_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="trivet.capture"):
        Taken(POOL, DRIVER + 3 * 2**20).check(LEDGER)
    (record,) = caplog.records
    assert "another process" in record.getMessage() and f"{DRIVER / 2**20:.2f} MiB" in record.getMessage()
