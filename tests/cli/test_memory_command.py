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


def test_json_is_one_object_of_the_planned_ledger(trivet_command: Run) -> None:
    outcome = trivet_command("memory", "tiny-qwen3", "--device-memory", "2GiB", "--json")
    assert outcome.code == 0 and outcome.err == ""
    found = json.loads(outcome.out)
    assert set(found) == {"items", "total_bytes", "kv_pages"}
    assert all(set(item) == {"name", "bytes", "source"} for item in found["items"])
    assert found["total_bytes"] == sum(item["bytes"] for item in found["items"])
    planned = trivet.plan_memory("tiny-qwen3", device_memory_bytes=2 * 2**30)
    assert found == json.loads(json.dumps(planned.as_json()))


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
        (["--max-context", "128"], {"limits": trivet.Limits(max_context=128)}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_option_reaches_the_plan(trivet_command: Run, options: list[str], arguments: dict[str, Any]) -> None:
    outcome = trivet_command("memory", "tiny-qwen3", "--json", *options)
    assert outcome.code == 0, outcome.err
    planned = trivet.plan_memory("tiny-qwen3", **arguments)
    assert json.loads(outcome.out) == json.loads(json.dumps(planned.as_json()))


def test_people_get_every_line_the_total_and_the_pages(trivet_command: Run) -> None:
    outcome = trivet_command("memory", "tiny-qwen3", "--device", "h200")
    ledger = trivet.plan_memory("tiny-qwen3", device="h200")
    for line in ledger.items:
        assert line.name in outcome.out
    assert "total" in outcome.out and f"{ledger.kv_pages} KV pages" in outcome.out


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
    assert json.loads(outcome.out) == trivet.plan_memory("tiny-qwen35", **asked).as_json()
    outcome = trivet_command("memory", "tiny-qwen35", "--no-prefix-cache", "--json")
    assert json.loads(outcome.out) == trivet.plan_memory("tiny-qwen35", prefix_cache=False).as_json()


def test_live_memory_serves_what_the_context_holds(trivet_command: Run) -> None:
    for limits in (("--max-context", "64"), ("--max-step-tokens", "1024"), ("--max-context", "2")):
        outcome = trivet_command("memory", "tiny-qwen3", "--live", "--device", "cpu", *limits)
        assert outcome.code == 0, outcome.err
