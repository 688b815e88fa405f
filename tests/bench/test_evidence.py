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
INDEX = (DOCS / "evidence" / "README.md").read_text(encoding="utf-8")
RECORDS = sorted((DOCS / "evidence").glob("cpu-*.json"))
DEVICE_RECORDS = sorted((DOCS / "evidence").glob("qwen3*-h200.json"))


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
        ttft_ms = statistics.median(call["all_ttft_ms"] for call in entry["calls"])
        rows.append(
            (entry["batch"], *(entry["medians"][name] for name in ("mean", "p50", "p95", "p99")), rate, ttft_ms)
        )
    return table(("batch", "TPOT ms", "p50", "p95", "p99", "tok/s of the call", "TTFT ms"), rows)


PARTS = {
    "products": ("_rows_kernel", "_tiles_kernel", "nvjet"),
    "attention": ("_split_kv", "flashinfer::BatchPrefill", "flashinfer::PersistentVariableLengthMerge"),
    "states": ("_delta_state_kernel",),
}
"""How the names of kernels begin, or what stands in them, by what they are part of."""


def breakdown_table() -> str:
    rows = []
    for model in TARGETS:
        for entry in record(f"{model}-generate-h200")["results"]["kernels"]:
            if "batch" not in entry:
                continue
            ms = dict.fromkeys([*PARTS, "the rest"], 0.0)
            for kernel in entry["kernels"]:
                part = next(
                    (part for part, names in PARTS.items() if any(n in kernel["name"] for n in names)), "the rest"
                )
                ms[part] += kernel["total_us"] / entry["steps"] / 1e3
            rate = entry["weight_bytes"] / ms["products"] / 1e9
            idle = entry["idle_us"] / entry["steps"] / 1e3
            rows.append(
                (model, entry["batch"], ms["products"], rate, ms["attention"], ms["states"], ms["the rest"], idle)
            )
    return table(("model", "rows", "products", "at TB/s", "attention", "states", "the rest", "idle"), rows)


def device_arms_table() -> str:
    rows = []
    for kept in (
        "qwen3-14b-slice-arms",
        "qwen3-14b-arms",
        "qwen3-14b-graphs",
        "qwen3.5-27b-arms",
        "qwen3.5-27b-graphs",
    ):
        found = record(f"{kept}-h200")
        for batch in found["results"]["batches"]:
            for name, arm in batch["arms"].items():
                medians = [arm["medians"][figure] for figure in ("mean", "p99", "plan_cpu_mean")]
                counts = [
                    f"{arm['counts_per_step'][count]:g}"
                    for count in ("plan_allocations", "allocations", "launches", "graph_launches")
                ]
                rows.append((found["settings"]["model"], batch["batch"], name, *medians, *counts))
    header = ("model", "batch", "arm", "mean ms", "p99", "plan CPU", "plan allocations", "allocations")
    return table((*header, "launches", "graphs"), rows)


def serve_table() -> str:
    rows = []
    for model in TARGETS:
        results = record(f"{model}-serve-h200")["results"]
        times = [results[kind][figure] for kind in ("ttft_ms", "itl_ms") for figure in ("mean", "p50", "p95", "p99")]
        rows.append((model, results["tokens_per_second"], *times))
    header = (
        "model",
        "tok/s",
        *(f"{kind} {what}" for kind in ("TTFT", "ITL") for what in ("mean", "p50", "p95", "p99")),
    )
    return table(header, rows)


TARGETS = {
    "qwen3-14b": {"TPOT 1": 7.5, "TPOT 16": 8.2, "TPOT 64": 10.3, "tok/s": 4100, "TTFT": 180, "start": 25},
    "qwen3.5-27b": {"TPOT 1": 13.5, "TPOT 16": 15.8, "TPOT 64": 20.6, "tok/s": 2060, "TTFT": 330, "start": 40},
}
"""Milliseconds, tokens per second, and seconds to the first token of a process with warm kernel caches."""


def targets_table() -> str:
    rows = []
    for model, targets in TARGETS.items():
        generated = record(f"{model}-generate-h200")["results"]
        found = {f"TPOT {entry['batch']}": entry["medians"]["mean"] for entry in generated["batches"]}
        found["TTFT"] = statistics.median(generated["ttft"][0]["ttft_ms"])
        many = record(f"{model}-throughput-h200")["results"]["throughput"]
        found["tok/s"] = statistics.median(many["tokens_per_second"])
        found["start"] = record(f"{model}-startup-h200")["results"]["medians"]["warm"]["total_s"]
        for what, target in targets.items():
            short = (target - found[what] if what == "tok/s" else found[what] - target) / target
            rows.append((model, what, f"{target:g}", found[what], f"{short:.1%}" if short > 0 else ""))
    return table(("model", "figure", "target", "measured", "short by"), rows)


TABLES = [peer_table, arms_table, host_table, lookup_table, generate_table, targets_table]
TABLES += [partial(generate_table, "qwen3.5-27b", "generate"), breakdown_table, device_arms_table, serve_table]
TABLES += [partial(generate_table, "qwen3-14b", "batches")]
TABLES += [partial(generate_table, model, "pinned") for model in TARGETS]
TABLES += [partial(generate_table, f"qwen3-{size}") for size in ("0.6b", "4b")]


@pytest.mark.parametrize("expected", TABLES)
def test_a_table_of_the_page_follows_from_its_record(expected: Any) -> None:
    assert expected() in PAGE, f"expected in sdk_docs/bench.md:\n{expected()}"


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_that_is_kept_names_its_commit_and_command_and_stands_in_the_page(path: Path) -> None:
    kept = json.loads(path.read_text())
    assert kept["schema_version"] == SCHEMA_VERSION
    assert re.fullmatch(r"[0-9a-f]{40}\+?", kept["commit"])
    assert kept["command"] in PAGE and f"evidence/{path.name}" in PAGE


@pytest.mark.parametrize("path", DEVICE_RECORDS, ids=lambda path: path.stem)
def test_a_record_of_a_device_names_its_tree_and_command_and_is_linked(path: Path) -> None:
    kept = json.loads(path.read_text())
    trees = [kept.get("commit") or kept.get("tree")]
    assert all(re.fullmatch(r"[0-9a-f]{7,40}", tree) for tree in trees)
    assert kept.get("command") or kept.get("commands")
    assert f"({path.name})" in INDEX


def test_the_kept_figures_follow_from_the_kept_samples() -> None:
    for batch in record("cpu-decode-arms")["results"]["batches"]:
        for arm in batch["arms"].values():
            for pair in arm["pairs"]:
                assert pair["figures"]["p99"] == pytest.approx(Figures.of(pair["wall_ms"]).p99, abs=1e-4)
