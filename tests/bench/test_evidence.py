"""The figures in the page on benchmarks are those of the records that are kept as evidence."""

from __future__ import annotations

import json
import re
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trivet.bench.figures import Figures, table
from trivet.bench.record import SCHEMA_VERSION

DOCS = Path(__file__).parents[2] / "sdk_docs"
PAGE = (DOCS / "bench.md").read_text(encoding="utf-8")
RECORDS = sorted((DOCS / "evidence").glob("cpu-*.json"))


def record(name: str) -> Any:
    return json.loads((DOCS / "evidence" / f"{name}.json").read_text())


def peer_table() -> str:
    rows = []
    for model in ("qwen3", "qwen35"):
        for comparison, found in record(f"cpu-decode-peer-{model}")["results"]["comparisons"].items():
            ratios = found["ratios"]
            rows.append((f"tiny-{model}", comparison, found["median_ratio"], min(ratios), max(ratios)))
    return table(("model", "comparison", "median", "least", "most"), rows)


def arms_table() -> str:
    rows = []
    for batch in record("cpu-decode-arms")["results"]["batches"]:
        for name, arm in batch["arms"].items():
            medians = [arm["medians"][figure] for figure in ("mean", "p50", "p95", "p99", "plan_cpu_mean")]
            rows.append((batch["batch"], name, *medians, f"{arm['counts_per_step']['allocations']:g}"))
    return table(("batch", "arm", "mean ms", "p50", "p95", "p99", "plan CPU", "allocations"), rows)


def host_table() -> str:
    steps = record("cpu-host")["results"]["steps"]
    rows = [
        (entry["requests"], entry["cached_pages"], entry["own_ms"], entry["own_ms"] / entry["requests"] * 1e3)
        for entry in steps
    ]
    return table(("requests", "cached pages", "own ms", "us a request"), rows)


def lookup_table() -> str:
    rows = [
        (entry["cached_pages"], entry["matched_pages"], entry["p50_us"], entry["again_p50_us"])
        for entry in record("cpu-host")["results"]["lookups"]
    ]
    return table(("cached pages", "matched pages", "first look us", "second look us"), rows)


def generate_table(model: str = "qwen3-14b", kind: str = "generate") -> str:
    rows = []
    for entry in record(f"{model}-{kind}-h200")["results"]["batches"]:
        tokens = entry["batch"] * entry["new_tokens"]
        rate = statistics.median(tokens / call["seconds"] for call in entry["calls"])
        ttft_ms = statistics.median(call["ttft_ms"] for call in entry["calls"])
        rows.append(
            (entry["batch"], *(entry["medians"][name] for name in ("mean", "p50", "p95", "p99")), rate, ttft_ms)
        )
    return table(("batch", "TPOT ms", "p50", "p95", "p99", "tok/s", "TTFT ms"), rows)


TABLES = [peer_table, arms_table, host_table, lookup_table, generate_table]
TABLES += [partial(generate_table, "qwen3.5-27b", kind) for kind in ("generate", "pinned")]


@pytest.mark.parametrize("expected", TABLES)
def test_a_table_of_the_page_follows_from_its_record(expected: Any) -> None:
    assert expected() in PAGE, f"expected in sdk_docs/bench.md:\n{expected()}"


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_that_is_kept_names_its_commit_and_command_and_stands_in_the_page(path: Path) -> None:
    kept = json.loads(path.read_text())
    assert kept["schema_version"] == SCHEMA_VERSION
    assert re.fullmatch(r"[0-9a-f]{40}\+?", kept["commit"])
    assert kept["command"] in PAGE and f"evidence/{path.name}" in PAGE


def test_the_kept_figures_follow_from_the_kept_samples() -> None:
    for batch in record("cpu-decode-arms")["results"]["batches"]:
        for arm in batch["arms"].values():
            for pair in arm["pairs"]:
                assert pair["figures"]["p99"] == pytest.approx(Figures.of(pair["wall_ms"]).p99, abs=1e-4)
