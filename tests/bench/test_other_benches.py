"""``bench serve``, ``startup`` and ``host``: what each promises to keep."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trivet.bench.startup import CHILD
from trivet.capacity import DeviceProfile, Limits

Run = Callable[..., Any]


def test_serving_keeps_when_each_client_got_each_token(bench: Run, checkpoints: dict[str, Path]) -> None:
    outcome = bench(
        "serve", "--model", checkpoints["qwen3"], "--requests", 5, "--prompt-tokens", "2-9", "--new-tokens", 4,
        "--concurrency", 2,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    results = outcome.record["results"]
    clients = results["clients"]
    assert len(clients) == 5 and results["new_tokens"] == 20
    for client in clients:
        assert 2 <= client["prompt_tokens"] <= 9
        moments = [client["sent_ms"], *client["tokens_ms"]]
        assert len(moments) == 5 and moments == sorted(moments)
    for client in clients:
        open_then = sum(c["sent_ms"] <= client["sent_ms"] < c["tokens_ms"][-1] for c in clients)
        assert open_then <= 2, "no more than --concurrency are open at once"
    assert results["ttft_ms"]["count"] == 5 and results["itl_ms"]["count"] == 15
    assert "TTFT" in outcome.out and "ITL" in outcome.out and "tok/s" in outcome.out


FAKE_START = """
import json, os, pathlib, sys
print("a library greets")
folder = pathlib.Path(os.environ["PYTHONPYCACHEPREFIX"])
found = (folder / "compiled").exists()
folder.mkdir(parents=True, exist_ok=True)
(folder / "compiled").touch()
told = open(int(sys.argv[3]), "w")
print(json.dumps({"import_s": float(found), "load_s": 0.0, "first_token_s": 0.0}), file=told)
print(json.dumps({"gpu": "of the start", "load": json.loads(sys.argv[2])}), file=told, flush=True)
"""


def test_a_cold_start_finds_nothing_compiled_and_a_warm_one_does(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.bench.startup.CHILD", FAKE_START)
    outcome = bench("startup", "--cold", 2, "--warm", 2)
    assert outcome.code == 0, outcome.err
    starts = outcome.record["results"]["starts"]
    assert [(start["temperature"], start["import_s"]) for start in starts] == [
        ("cold", 0.0),
        ("cold", 0.0),
        ("warm", 1.0),
        ("warm", 1.0),
    ]


def test_the_record_of_starts_has_the_machine_as_they_saw_it(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.bench.startup.CHILD", FAKE_START)
    record = bench("startup", "--warm", 1).record
    assert record["machine"] == {"gpu": "of the start", "load": {}} and "machine" not in record["results"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_start_with_one_limit_named_takes_the_others_of_its_device(
    kind: str, bench: Run, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the device is named or found by the start itself."""
    head = CHILD.partition("with Runtime.load")[0]
    found = (torch.device(kind), DeviceProfile.named("cpu"))
    monkeypatch.setattr("trivet.runtime.device.resolve_device", lambda device: found)
    monkeypatch.setattr("trivet.bench.startup.CHILD", FAKE_START)
    for named in ((), ("--device", kind)):
        options = ("--model", checkpoints["qwen3"], *named, "--max-context", 4000)
        load = bench("startup", "--warm", 1, *options).record["machine"]["load"]
        told = os.open(os.devnull, os.O_WRONLY)
        monkeypatch.setattr("sys.argv", ["-c", str(checkpoints["qwen3"]), json.dumps(load), str(told)])
        names: dict[str, Any] = {}
        exec(head, names)
        names["told"].close()
        assert names["load"]["limits"] == Limits.for_device(kind, max_context=4000)


def test_a_limit_that_cannot_be_is_refused_before_anything_is_started(
    bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet.bench.startup.CHILD", "raise SystemExit('it was started')")
    outcome = bench("startup", "--max-context", 2**30)
    assert outcome.code == 1 and "max_context" in outcome.err and "it was started" not in outcome.err


@pytest.mark.parametrize("before", ["", "import os, sys; os.write(int(sys.argv[3]), b'{}' + b'\\n')\n"])
def test_a_start_that_does_not_end_is_ended(before: str, bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither without a token nor with one."""
    monkeypatch.setattr("trivet.bench.startup.CHILD", f"{before}import time; time.sleep(60)")
    monkeypatch.setattr("trivet.bench.startup.TIMEOUT_S", 1)
    outcome = bench("startup")
    assert outcome.code == 1 and outcome.record is None
    assert "did not end within 1 s" in outcome.err


def test_a_start_that_fails_is_an_error_with_its_last_words(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.bench.startup.CHILD", "raise SystemExit('the model is not there')")
    outcome = bench("startup")
    assert outcome.code == 1 and outcome.record is None
    assert "exit code 1: the model is not there" in outcome.err


@pytest.mark.slow
def test_a_real_start_is_timed_from_the_process_to_its_first_token(bench: Run, checkpoints: dict[str, Path]) -> None:
    outcome = bench("startup", "--model", checkpoints["qwen3"], "--device", "cpu", "--warm", 1, "--max-context", 32)
    assert outcome.code == 0, outcome.err
    for start in outcome.record["results"]["starts"]:
        phases = [start[name] for name in ("interpreter_s", "import_s", "load_s", "first_token_s")]
        assert all(seconds > 0 for seconds in phases) and start["total_s"] == pytest.approx(sum(phases))
    assert outcome.record["machine"]["torch_threads"] > 0


def test_host_cost_is_kept_for_every_combination(bench: Run) -> None:
    outcome = bench("host", "--requests", "1,3", "--cached-pages", "10,40", "--steps", 6)
    assert outcome.code == 0, outcome.err
    steps = outcome.record["results"]["steps"]
    assert [(entry["requests"], entry["cached_pages"]) for entry in steps] == [(1, 10), (1, 40), (3, 10), (3, 40)]
    for entry in steps:
        assert [len(entry[name]) for name in ("wall_ms", "cpu_ms", "sampler_ms")] == [6, 6, 6]
        assert entry["own_ms"] == pytest.approx(entry["wall"]["p50"] - entry["sampler"]["p50"])
        assert entry["pages_in_cache"] >= entry["cached_pages"] or entry["requests"] > 1
    lookups = outcome.record["results"]["lookups"]
    assert [entry["matched_pages"] for entry in lookups] == [10, 40]


def test_a_lookup_costs_the_same_in_a_cache_a_hundred_times_as_large(bench: Run) -> None:
    outcome = bench("host", "--requests", "1", "--cached-pages", "200,20000", "--steps", 2)
    assert outcome.code == 0, outcome.err
    small, large = (entry["again_p50_us"] for entry in outcome.record["results"]["lookups"])
    assert large < 5 * small  # a generous ratio: a search that grew with the cache would be at 100
