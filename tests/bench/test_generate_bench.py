"""``trivet bench generate`` measures the steps that it names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from tests.support.checkpoints import make_qwen3

import trivet
from trivet.bench import generate
from trivet.bench.generate import (
    CACHED_PREFIX_REST,
    Caller,
    GenerateSettings,
    bench_generate,
    decode_gaps_ms,
    seconds_by_path,
)
from trivet.bench.profiling import HEARD_STEPS, PROFILED_STEPS
from trivet.bench.stepping import BenchmarkError
from trivet.bench.timeline import Breakdown, DeviceEvent
from trivet.runtime.step import StepReport


def test_only_consecutive_steps_in_which_all_decode_are_timed() -> None:
    kinds = [("prefill", 2), ("mixed", 3), ("decode", 3), ("decode", 3), ("decode", 3), ("decode", 2), ("decode", 2)]
    steps = [(float(second), StepReport(path=path, rows=rows)) for second, (path, rows) in enumerate(kinds)]
    assert decode_gaps_ms(steps, 3) == [1000.0, 1000.0]
    assert decode_gaps_ms(steps, 2) == [1000.0]
    assert decode_gaps_ms(steps, 4) == []


def test_the_time_until_the_last_step_ended_is_that_of_the_paths() -> None:
    kinds = [("prefill", 2.0), ("mixed", 2.5), ("decode", 3.0), ("mixed", 4.0), ("decode", 4.125)]
    steps = [(ended, StepReport(path=path)) for path, ended in kinds]
    assert seconds_by_path(steps) == {"prefill": (1, 2.0), "mixed": (2, 1.5), "decode": (2, 0.625)}


def test_every_call_is_in_the_record(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    load = {"device": "cpu", "dtype": "float32"}
    settings = GenerateSettings(str(tmp_path), (1, 3), 9, 6, 2, 5, 4, (20,), (32,), False, 0, load)
    said: list[str] = []
    results = bench_generate(settings, said.append)
    assert [entry["batch"] for entry in results["batches"]] == [1, 3]
    for entry in results["batches"]:
        assert [len(call["gaps_ms"]) > 0 for call in entry["calls"]] == [True, True]
        least = min(min(call["gaps_ms"]) for call in entry["calls"])
        most = max(max(call["gaps_ms"]) for call in entry["calls"])
        assert 0 < least <= entry["medians"]["mean"] <= most
        assert all(0 < call["ttft_ms"] <= call["all_ttft_ms"] < call["seconds"] * 1e3 for call in entry["calls"])
    assert len(results["throughput"]["tokens_per_second"]) == 2
    for paths in results["throughput"]["steps_by_path"]:
        assert all(took > 0 for _, took in paths.values()) and paths["decode"][0] >= 3
    (long,) = results["ttft"]
    assert long["prompt_tokens"] == 20 and len(long["ttft_ms"]) == 3
    assert "TPOT" in said[0] and "tok/s" in said[1] and "20 tokens" in said[3]
    (warm,) = results["warm_ttft"]
    assert warm["cached_tokens"] == warm["prefix_tokens"] == 32 and len(warm["ttft_ms"]) == 3
    assert warm["rest_tokens"] == CACHED_PREFIX_REST
    assert f"TTFT of {CACHED_PREFIX_REST} tokens behind 32 cached ones:" in said[4]
    assert results["stats"]["requests_failed"] == 0


def test_a_call_that_never_decodes_together_is_refused(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    load = {"device": "cpu", "dtype": "float32"}
    for new_tokens, kernels, limits, text in (
        (1, False, {}, "no two decode steps"),
        (8, True, {}, "the kernels of a cpu cannot be told apart: leave --kernels out"),
        (8, False, {"max_requests": 1}, "max_requests allows 1"),
        (8, False, {"max_step_tokens": 1}, "max_step_tokens allows 1"),
    ):
        asked = load | ({"limits": limits} if limits else {})
        settings = GenerateSettings(str(tmp_path), (2,), 9, new_tokens, 1, 0, 1, (), (), kernels, 0, asked)
        with pytest.raises(BenchmarkError, match=text):
            bench_generate(settings, print)


def warm_settings(directory: Path, prefix_tokens: int) -> GenerateSettings:
    load = {"device": "cpu", "dtype": "float32", "limits": {"page_size": 16}}
    return GenerateSettings(str(directory), (1,), 4, 4, 1, 0, 1, (), (prefix_tokens,), False, 0, load)


def test_a_prefix_that_the_grain_cuts_leaves_more_tokens_to_compute_and_the_record_says_so(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    said: list[str] = []
    (warm,) = bench_generate(warm_settings(tmp_path, 47), said.append)["warm_ttft"]
    assert (warm["prefix_tokens"], warm["cached_tokens"]) == (47, 32)
    assert warm["rest_tokens"] == 47 + CACHED_PREFIX_REST - 32
    assert "TTFT of 31 tokens behind 32 cached ones, which the cache's grain leaves of a prefix of 47:" in said[-1]


def test_a_prefix_below_the_grain_is_refused_before_anything_is_timed(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    said: list[str] = []
    with pytest.raises(BenchmarkError, match=r"prefix of 15 tokens is never found .* multiples of 16 tokens"):
        bench_generate(warm_settings(tmp_path, 15), said.append)
    assert not said


def test_a_prefix_that_is_never_hit_is_no_measurement(tmp_path: Path) -> None:
    make_qwen3(tmp_path)
    settings = warm_settings(tmp_path, 16)
    settings = attrs.evolve(settings, load={**settings.load, "prefix_cache": False})
    with pytest.raises(BenchmarkError, match=r"prefix of 16 tokens was not found .* multiples of 16 tokens"):
        bench_generate(settings, print)


@pytest.mark.parametrize(("found", "text"), [((48, 48, 0), "was not found"), ((48, 32, 48), "32 and 48 were found")])
def test_runs_that_find_other_parts_of_a_prefix_are_not_compared(
    found: tuple[int, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3(tmp_path)
    timed, runs = generate._timed_prompt, iter((0, *[48] * generate.WARM_RUNS, *found))

    def partly_found(*arguments: Any) -> Any:
        took_ms, out = timed(*arguments)
        return took_ms, attrs.evolve(out, cached_tokens=next(runs))

    monkeypatch.setattr(generate, "_timed_prompt", partly_found)
    with pytest.raises(BenchmarkError, match=text):
        bench_generate(warm_settings(tmp_path, 48), print)


@pytest.mark.parametrize("tied", [False, True])
def test_a_decode_step_of_each_batch_and_a_call_of_each_prompt_are_told_by_kernel(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device, with a profiler that says what ran: half of each of 16 steps of 100 us, or 6 of 9 us."""
    make_qwen3(tmp_path, tie_word_embeddings=tied)
    heard: list[StepReport] = []

    class Profile:
        graph_steps = PROFILED_STEPS

        def __init__(self, engine: Any, rows: int) -> None:
            heard.clear()

        def hear(self, step: StepReport) -> None:
            heard.append(step)

        def breakdown(self) -> Breakdown:
            return Breakdown.of([DeviceEvent("k", 100.0 * step, 100.0 * step + 50) for step in range(16)], 0, 1600)

    @contextmanager
    def events(device: Any) -> Iterator[list[DeviceEvent]]:
        yield [DeviceEvent("a", 0, 4), DeviceEvent("b", 7, 9)]

    monkeypatch.setattr(generate, "DecodeProfile", Profile)
    monkeypatch.setattr(generate, "device_events", events)
    settings = GenerateSettings(str(tmp_path), (2,), 9, 4, 1, 0, 1, (20,), (), True, 0, {})
    said: list[str] = []
    with trivet.Runtime.load(tmp_path, device="cpu", dtype="float32", limits=trivet.Limits(2, 16, 128)) as runtime:
        caller = Caller(runtime, np.random.default_rng(0))
        (step,) = generate._step_kernels(caller, settings, {2: 99.0}, said.append)
        assert sum(report.path == "decode" and report.rows == 2 for report in heard) >= HEARD_STEPS
        (prompt,) = generate._prompt_kernels(caller, settings, said.append)
        weights = runtime._engine.owned["weights"]
        read_bytes = weights.storage_bytes - (0 if tied else weights["embedding.weight"].nbytes)
    assert step == {
        "batch": 2,
        "steps": 16,
        "graph_steps": 16,
        "weight_bytes": read_bytes,
        "weight_tb_per_s": pytest.approx(read_bytes / 100e-6 / 1e12),
        "span_us": 1600,
        "idle_us": 800,
        "kernels": [{"name": "k", "count": 16, "total_us": 800}],
    }
    assert prompt.pop("seconds") > 0
    kernels = [{"name": "a", "count": 1, "total_us": 4}, {"name": "b", "count": 1, "total_us": 2}]
    assert prompt == {"prompt_tokens": 20, "steps": 2, "span_us": 9, "idle_us": 3, "kernels": kernels}
    assert "device idle 50.0 us of a step of 100.0 us" in said[0] and "a step took 99.0 us" in said[1]
    assert "prompt of 20 tokens by kernel, steps: 2" in said[2] and "device idle 3.0 us of a call of 9.0 us" in said[2]
