"""``trivet memory`` prints the ledger that `plan_memory` makes, and nothing else where a machine reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
import pytest
from attrs import fields

import trivet
from trivet.cli.sizing import sizing_options
from trivet.layout import Buffers
from trivet.runtime.options import SizingOptions

Run = Callable[..., Any]


def ledger_of(found: dict[str, Any]) -> dict[str, Any]:
    """What of the command's object is the ledger's own."""
    return {name: found[name] for name in ("items", "total_bytes", "kv_pages")}


def test_json_is_one_object_of_the_planned_ledger(trivet_command: Run) -> None:
    outcome = trivet_command("memory", "tiny-qwen3", "--device-memory", "2GiB", "--json")
    assert outcome.code == 0 and outcome.err == ""
    found = json.loads(outcome.out)
    assert found["total_bytes"] == sum(item["bytes"] for item in found["items"])
    planned = trivet.plan_memory("tiny-qwen3", device_memory_bytes=2 * 2**30)
    assert ledger_of(found) == planned.as_json()
    assert set(found["owned"]) == {item["name"] for item in found["items"]} - {"activations"}
    assert found["budget_bytes"] == planned.budget_bytes
    assert found["device"] == {"name": "cpu", "memory_bytes": 2 * 2**30}
    assert found["limits"] == {"max_requests": 8, "max_step_tokens": 256, "max_context": 1024, "page_size": 16}
    assert found["kv_tokens"] == planned.kv_pages * 16
    assert found["full_length_requests"] == planned.kv_pages // 64


def test_a_limit_that_is_named_leaves_the_others_to_the_device_and_the_model(trivet_command: Run) -> None:
    def limits(*options: str) -> dict[str, int]:
        return dict(json.loads(trivet_command("memory", *options, "--json").out)["limits"])

    for device in ("cpu", "h200"):
        own = limits("qwen3-0.6b", "--device", device)
        assert limits("qwen3-0.6b", "--device", device, "--max-requests", "3") == {**own, "max_requests": 3}
    assert limits("tiny-qwen3", "--device", "h200", "--page-size", "32")["max_context"] == 1024
    live = trivet_command("memory", "tiny-qwen3", "--live", "--device", "cpu", "--max-context", "64", "--json")
    assert json.loads(live.out)["limits"] == {**limits("tiny-qwen3"), "max_context": 64}


def test_a_budget_that_is_too_small_is_shown_in_lines_and_told_in_one(trivet_command: Run) -> None:
    outcome = trivet_command("memory", "qwen3-14b", "--device", "rtx4090")
    assert outcome.code == 1 and outcome.err.count("\n") == 1 and "bytes too small" in outcome.err
    assert {line.split("  ")[0] for line in outcome.out.splitlines()} >= {"weights", "KV pages", "total", "budget"}
    outcome = trivet_command("memory", "qwen3-14b", "--device", "rtx4090", "--json")
    assert outcome.code == 1 and outcome.out == "" and outcome.err.count("\n") == 1


def test_a_device_of_this_machine_is_told_from_one_that_is_planned_for(trivet_command: Run) -> None:
    for device in ("cuda", "cuda:1"):
        outcome = trivet_command("memory", "tiny-qwen3", "--device", device)
        assert outcome.code == 1 and "--live" in outcome.err and "rtx4090" in outcome.err
    assert trivet_command("memory", "tiny-qwen3").out.startswith("device  cpu, this machine's; --device NAME")


def test_only_parameter_lines_have_weight_in_their_names(trivet_command: Run) -> None:
    items = json.loads(trivet_command("memory", "tiny-qwen3", "--json").out)["items"]
    assert [item["name"] for item in items if "weight" in item["name"]] == ["weights"]


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["--dtype", "float32"], {"dtype": "float32"}),
        (["--kv-pages", "7"], {"kv_pages": 7}),
        (["--device", "h200"], {"device": "h200"}),
        (["--device", "h200", "--device-memory", "80GiB"], {"device": "h200", "device_memory_bytes": 80 * 2**30}),
        (["--memory-fraction", "0.5", "--device", "l4"], {"memory_fraction": 0.5, "device": "l4"}),
        (
            ["--max-requests", "3", "--max-step-tokens", "17", "--max-context", "100", "--page-size", "4"],
            {"limits": trivet.Limits(3, 17, 100, 4)},
        ),
        (["--max-context", "128"], {"limits": trivet.Limits.for_device("cpu", max_context=128)}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_option_reaches_the_plan(trivet_command: Run, options: list[str], arguments: dict[str, Any]) -> None:
    outcome = trivet_command("memory", "tiny-qwen3", "--json", *options)
    assert outcome.code == 0, outcome.err
    assert ledger_of(json.loads(outcome.out)) == trivet.plan_memory("tiny-qwen3", **arguments).as_json()


def test_people_get_every_line_the_total_and_the_pages(trivet_command: Run) -> None:
    outcome = trivet_command("memory", "tiny-qwen3", "--device", "h200")
    ledger = trivet.plan_memory("tiny-qwen3", device="h200")
    for line in ledger.items:
        assert line.name in outcome.out
    assert "total" in outcome.out
    assert outcome.out.startswith("device  h200\nlimits  64 requests, 4096 tokens a step, a context of 1024 tokens, ")
    tokens, contexts = ledger.kv_pages * 16, ledger.kv_pages // 64
    assert outcome.out.endswith(f"{ledger.kv_pages} KV pages: {tokens} tokens, {contexts} whole contexts of 1024\n")


def test_live_memory_is_held_against_the_plan_line_by_line(
    trivet_command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("memory", "tiny-qwen3", "--live", "--device", "cpu", "--dtype", "float32", "--kv-pages", "7")
    outcome = trivet_command(*command, "--json")
    assert outcome.code == 0
    shown = json.loads(outcome.out)
    planned = {item["name"]: item["bytes"] for item in shown["items"] if item["name"] != "activations"}
    assert shown["live"]["owned_bytes"] == planned
    assert shown["live"]["taken_bytes"] is None  # a CPU has no driver to ask
    monkeypatch.setattr(Buffers, "storage_bytes", property(lambda buffers: buffers.layout.total_bytes + 8))
    outcome = trivet_command(*command)
    assert outcome.code == 1 and "was planned with" in outcome.err


def test_options_of_a_plan_and_of_a_loaded_runtime_are_not_mixed(trivet_command: Run) -> None:
    for command in (("--live", "--device-memory", "1GiB"), ("--weights", "random")):
        outcome = trivet_command("memory", "tiny-qwen3", *command)
        assert outcome.code == 2 and "--live" in outcome.err


def test_every_sizing_argument_of_loading_is_an_option_and_reaches_the_plan(trivet_command: Run) -> None:
    @click.command()
    @sizing_options
    def sized(**given: object) -> None: ...

    offered = {parameter.name for parameter in sized.params}
    assert {field.name for field in fields(SizingOptions)} - {"limits", "cuda_graphs"} <= offered
    words = "--snapshot-stride 32 --snapshot-memory 1MiB --numeric-policy tuned --attention reference"
    outcome = trivet_command("memory", "tiny-qwen35", *words.split(), "--json")
    asked = {"snapshot_stride": 32, "snapshot_bytes": 2**20, "numeric_policy": "tuned", "attention": "reference"}
    assert ledger_of(json.loads(outcome.out)) == trivet.plan_memory("tiny-qwen35", **asked).as_json()
    outcome = trivet_command("memory", "tiny-qwen35", "--no-prefix-cache", "--json")
    assert ledger_of(json.loads(outcome.out)) == trivet.plan_memory("tiny-qwen35", prefix_cache=False).as_json()


def test_live_memory_serves_what_the_context_holds(trivet_command: Run) -> None:
    for limits in (("--max-context", "64"), ("--max-step-tokens", "1024"), ("--max-context", "2")):
        outcome = trivet_command("memory", "tiny-qwen3", "--live", "--device", "cpu", *limits)
        assert outcome.code == 0, outcome.err
