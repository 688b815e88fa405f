"""A load says how far it has come: weights wherever they come from, then captured steps, on one scale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.runtime.test_captured_steps import blueprint_of

import trivet
from trivet.reservation import GRAPHS_LINE
from trivet.runtime import engine, load
from trivet.runtime.capture import Taken
from trivet.runtime.engine import Engine

LIMITS = trivet.Limits(max_requests=2, max_step_tokens=8, max_context=64, page_size=4)


@pytest.mark.parametrize("weights", ["checkpoint", "random"])
def test_weights_are_told_of_up_to_their_bytes_wherever_they_come_from(weights: str, family_checkpoint: Path) -> None:
    told: list[tuple[int, int]] = []
    with trivet.Runtime.load(
        family_checkpoint,
        device="cpu",
        limits=LIMITS,
        weights=weights,
        autostart=False,
        progress=lambda done, total: told.append((done, total)),
    ) as runtime:
        weights_bytes = runtime.memory.line("weights").bytes
    done = [ready for ready, _ in told]
    assert len(done) > 5 and done == sorted(set(done)) and done[-1] == weights_bytes
    assert {total for _, total in told} == {weights_bytes}


@pytest.mark.parametrize("model", ["qwen3-14b", "qwen3.5-27b"])
def test_captured_steps_are_told_of_one_by_one_as_they_are_captured(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[Any] = []

    def steps(*args: object, **settings: object) -> SimpleNamespace:
        return SimpleNamespace(capture=lambda size, pool: happened.append(size))

    monkeypatch.setattr(engine, "GraphPool", lambda device: SimpleNamespace(taken=lambda: Taken(0, 0)))
    monkeypatch.setattr(engine, "DecodeGraphs", steps)
    monkeypatch.setattr(engine, "ShortPrompts", steps)
    blueprint = blueprint_of(model, "tuned")
    device_side: Any = SimpleNamespace(
        blueprint=blueprint,
        inputs=SimpleNamespace(device=None),
        owners={},
        sampling=SimpleNamespace(drawn_groups=None, any_groups=None),
        _sample=None,
    )
    device_side.capture_graphs = lambda: Engine.capture_graphs(device_side)
    filled, captured = load._stages(blueprint, lambda done, total: happened.append((done, total)))
    weights_bytes, graphs_bytes = blueprint.weights.total_bytes, blueprint.ledger.line(GRAPHS_LINE).bytes
    filled(weights_bytes, weights_bytes)
    assert happened.pop() == (weights_bytes, weights_bytes + graphs_bytes)
    load._capture(device_side, captured)
    sizes, told = happened[::2], happened[1::2]
    capacity = blueprint.capacity
    assert sizes == sorted((*capacity.graph_buckets, *capacity.prompt_buckets), reverse=True)
    total = weights_bytes + graphs_bytes
    assert told == [(weights_bytes + graphs_bytes * n // len(sizes), total) for n in range(1, len(sizes) + 1)]
    assert told[-1] == (total, total)


def test_what_progress_raises_is_not_blamed_on_the_family() -> None:
    def captures() -> Iterator[tuple[int, int]]:
        yield 1, 2
        raise AssertionError("went on after progress had failed")

    def progress(done: int, total: int) -> None:
        raise ValueError("the bar is broken")

    device_side: Any = SimpleNamespace(blueprint=blueprint_of("qwen3-14b", "tuned"), capture_graphs=captures)
    with pytest.raises(ValueError, match="the bar is broken"):
        load._capture(device_side, progress)


def test_what_a_capture_raises_is_blamed_on_the_family() -> None:
    def captures() -> Iterator[tuple[int, int]]:
        yield 1, 2
        raise ValueError("a layer allocates")

    device_side: Any = SimpleNamespace(blueprint=blueprint_of("qwen3-14b", "tuned"), capture_graphs=captures)
    with pytest.raises(trivet.PluginError, match=r"'qwen3' failed in the capture of its decode steps: ValueError: a l"):
        load._capture(device_side, None)
