"""``trivet bench generate`` measures the steps that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.checkpoints import make_qwen3

from trivet.bench.generate import GenerateSettings, bench_generate, decode_gaps_ms
from trivet.runtime.step import StepReport


def test_only_consecutive_steps_in_which_all_decode_are_timed() -> None:
    kinds = [("prefill", 2), ("mixed", 3), ("decode", 3), ("decode", 3), ("decode", 3), ("decode", 2), ("decode", 2)]
    steps = [(float(second), StepReport(path=path, rows=rows)) for second, (path, rows) in enumerate(kinds)]
    assert decode_gaps_ms(steps, 3) == [1000.0, 1000.0]
    assert decode_gaps_ms(steps, 2) == [1000.0]
    assert decode_gaps_ms(steps, 4) == []


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
        assert all(0 < call["ttft_ms"] / 1e3 < call["seconds"] for call in entry["calls"])
    assert len(results["throughput"]["tokens_per_second"]) == 2
    for seconds, paths in zip(results["throughput"]["seconds"], results["throughput"]["steps_by_path"], strict=True):
        assert sum(took for _, took in paths.values()) == pytest.approx(seconds, rel=0.2)
        assert paths["decode"][0] >= 3
    (long,) = results["ttft"]
    assert long["prompt_tokens"] == 20 and len(long["ttft_ms"]) == 3
    assert "TPOT" in said[0] and "tok/s" in said[1] and "20 tokens" in said[3]
    (warm,) = results["warm_ttft"]
    assert warm["cached_tokens"] == warm["prefix_tokens"] == 32 and len(warm["ttft_ms"]) == 3
    assert "behind 32 cached" in said[4]
    assert results["stats"]["requests_failed"] == 0


def test_a_call_that_never_decodes_together_is_refused(tmp_path: Path) -> None:
    from trivet.bench.stepping import BenchmarkError

    make_qwen3(tmp_path)
    load = {"device": "cpu", "dtype": "float32"}
    for new_tokens, kernels, limits, text in (
        (1, False, {}, "no two decode steps"),
        (8, True, {}, "--kernels"),
        (8, False, {"max_requests": 1}, "max_requests allows 1"),
        (8, False, {"max_step_tokens": 1}, "max_step_tokens allows 1"),
    ):
        asked = load | ({"limits": limits} if limits else {})
        settings = GenerateSettings(str(tmp_path), (2,), 9, new_tokens, 1, 0, 1, (), (), kernels, 0, asked)
        with pytest.raises(BenchmarkError, match=text):
            bench_generate(settings, print)
