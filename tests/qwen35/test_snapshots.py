"""Snapshots are copies, counted in the ledger; too little room for them costs time and never correctness."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.qwen35.conftest import Group6
from tests.support.poison import poison
from tests.support.positions import EveryPosition, drawn, serve

import trivet
from trivet.caches.state import StatePool, snapshots_within, state_layout

ATOL = 2e-3
LIMITS = trivet.Limits(max_requests=3, max_step_tokens=40, max_context=200, page_size=3)
OFF = "hybrid prefix caching is off"


def load(directory: Path, snapshot_bytes: int | None = None) -> trivet.Runtime:
    return trivet.Runtime.load(
        directory, device="cpu", limits=LIMITS, snapshot_bytes=snapshot_bytes, snapshot_stride=6, autostart=False
    )


def bytes_of_one(group6: Group6) -> int:
    """Of one snapshot: 3 recurrent layers, 4 value heads of 12 x 8, and 3 entries of 2 * 2 * 12 + 4 * 8 channels."""
    with load(group6.directory) as runtime:
        one = runtime.memory.line("snapshots").bytes // runtime.stats()["snapshots_total"]
    assert one == 3 * 4 * (4 * 12 * 8 + 3 * (2 * 2 * 12 + 4 * 8))
    return one


def turns(rng: np.random.Generator) -> list[list[int]]:
    system = drawn(rng, 60)
    return [[*system[: int(rng.integers(1, 61))], user, *drawn(rng, int(rng.integers(1, 40)))] for user in range(6)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_budget_of_few_snapshots_stays_correct(count: int, group6: Group6) -> None:
    rng = np.random.default_rng(count)
    budget = count * bytes_of_one(group6)
    with load(group6.directory, budget + 5) as runtime:
        assert runtime.stats()["snapshots_total"] == count
        assert runtime.memory.line("snapshots").bytes == budget
        ears = EveryPosition(runtime)
        prompts = turns(rng)
        for _ in range(3):
            samplings = [trivet.Sampling(max_new_tokens=int(n)) for n in rng.integers(1, 15, len(prompts))]
            requests = [runtime.submit(prompt, each) for prompt, each in zip(prompts, samplings, strict=True)]
            while not all(request.done for request in requests):
                poison(runtime)
                runtime.step()
            for prompt, request in zip(prompts, requests, strict=True):
                assert ears.worst_gap(group6.model, prompt, request) <= ATOL
        for prompt in prompts:  # alone, it finds what it left a moment ago however few there are
            for _ in range(2):
                (rerun,) = serve(runtime, [prompt], trivet.Sampling(max_new_tokens=9))
                assert ears.worst_gap(group6.model, prompt, rerun) <= ATOL
            assert rerun.completion.cached_tokens == (len(prompt) - 1) // 6 * 6


@pytest.mark.parametrize("budget", ["nothing", "less than one"])
def test_no_room_for_a_snapshot_turns_hybrid_prefix_caching_off_and_says_why(
    budget: str, group6: Group6, caplog: pytest.LogCaptureFixture
) -> None:
    one = bytes_of_one(group6)
    given = 0 if budget == "nothing" else one - 1
    rng = np.random.default_rng(0)
    prompt = drawn(rng, 50)
    with caplog.at_level(logging.WARNING, "trivet"), load(group6.directory, given) as runtime:
        (record,) = [record for record in caplog.records if OFF in record.getMessage()]
        assert f"snapshot_bytes is {given} bytes" in record.getMessage() and str(one) in record.getMessage()
        line = runtime.memory.line("snapshots")
        assert line.bytes == 0 and line.source == record.getMessage()
        ears = EveryPosition(runtime)
        for _ in range(2):
            (request,) = serve(runtime, [prompt], trivet.Sampling(max_new_tokens=3))
            assert request.completion.cached_tokens == 0
            assert ears.worst_gap(group6.model, prompt, request) <= ATOL
        stats = runtime.stats()
        assert stats["snapshots_total"] == stats["pages_cached"] == stats["prefix_hit_tokens"] == 0


def test_a_planned_memory_says_it_too_and_a_runtime_with_room_says_nothing(
    group6: Group6, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trivet"):
        trivet.plan_memory(group6.directory, limits=LIMITS)
        off = trivet.plan_memory(group6.directory, limits=LIMITS, prefix_cache=False).line("snapshots")
        assert OFF not in caplog.text
        assert off.source == f"{OFF}: prefix_cache=False"
        trivet.plan_memory(group6.directory, limits=LIMITS, snapshot_bytes=0)
        assert OFF in caplog.text


def test_a_snapshot_does_not_change_while_it_is_kept(group6: Group6) -> None:
    """Neither when the request that left it goes on, nor when others start from it and go on in its slot."""
    rng = np.random.default_rng(1)
    with load(group6.directory) as runtime:
        pool = runtime._engine.state
        shelf = runtime._engine.scheduler._holdings.shelf
        assert pool is not None and shelf is not None
        seen: dict[tuple[int, int], list[torch.Tensor]] = {}  # by node and snapshot id
        looked = 0
        base = drawn(rng, 50)
        for round_ in range(4):
            requests = [
                runtime.submit([*base[: int(n)], round_, *drawn(rng, 9)], trivet.Sampling(max_new_tokens=14))
                for n in rng.integers(20, 51, 3)
            ]
            while not all(request.done for request in requests):
                runtime.step()
                kept = {}
                for node in shelf._by_use:
                    assert node.snapshot is not None
                    key = (id(node), node.snapshot)
                    now = [view[node.snapshot] for view in pool._snapshot_views.values()]
                    if key in seen:
                        assert all(torch.equal(a, b) for a, b in zip(seen[key], now, strict=True))
                        looked += 1
                    kept[key] = seen.get(key) or [tensor.clone() for tensor in now]
                seen = kept
        assert looked > 50
        assert runtime.stats()["prefix_hit_tokens"] > 0


def test_saving_and_restoring_copy_every_layer_both_ways(group6: Group6) -> None:
    with load(group6.directory) as runtime:
        geometry = runtime._engine.blueprint.geometry
    pool = StatePool(
        geometry,
        state_layout("slots", geometry, 3, "float32").allocate("cpu"),
        state_layout("snapshots", geometry, 2, "float32").allocate("cpu"),
    )
    generator = torch.Generator().manual_seed(1)
    for layer in geometry.recurrent_layers:
        for view in (pool.recurrent(layer), pool.tail(layer)):
            view.copy_(torch.randn(view.shape, generator=generator))
    was = {layer: (pool.recurrent(layer).clone(), pool.tail(layer).clone()) for layer in geometry.recurrent_layers}
    pool.save(1, 0)
    pool.clear([1])
    for layer, (recurrent, tail) in was.items():
        assert not pool.recurrent(layer)[1].any() and not pool.tail(layer)[1].any()
        assert torch.equal(pool.recurrent(layer)[[0, 2]], recurrent[[0, 2]])
        assert torch.equal(pool.tail(layer)[[0, 2]], tail[[0, 2]])
    pool.restore(0, 2)
    for layer in was:
        pool.recurrent(layer)[2] += 1.0  # what was restored is a copy: the snapshot stays
        pool.tail(layer)[2] += 1.0
    pool.restore(0, 0)
    for layer, (recurrent, tail) in was.items():
        assert torch.equal(pool.recurrent(layer)[0], recurrent[1])
        assert torch.equal(pool.tail(layer)[0], tail[1])


def test_recurrent_states_are_float32_in_slots_and_snapshots_whatever_is_served(group6: Group6) -> None:
    with trivet.Runtime.load(
        group6.directory, device="cpu", limits=LIMITS, dtype="bfloat16", autostart=False
    ) as runtime:
        engine = runtime._engine
        assert engine.state is not None
        for views in (engine.state._slot_views, engine.state._snapshot_views):
            for name, view in views.items():
                assert view.dtype is (torch.float32 if name.startswith("recurrent") else torch.bfloat16)
        for layer in engine.model.layers:  # type: ignore[attr-defined]
            if type(layer.mixer).__name__ == "DeltaNet":
                assert layer.mixer.a_log.dtype is layer.mixer.dt_bias.dtype is torch.float32


def warm_and_cold(runtime: trivet.Runtime, prompt: Sequence[int]) -> tuple[trivet.Completion, trivet.Completion]:
    sampling = trivet.Sampling(max_new_tokens=12, logprobs=5)
    cold, warm = (runtime.generate([list(prompt)], sampling)[0] for _ in range(2))
    assert cold.cached_tokens == 0 and warm.cached_tokens > 0
    return warm, cold


def test_a_warm_start_in_bfloat16_is_as_exact_as_a_cold_one(group6: Group6) -> None:
    """Both are rounded to bfloat16 in every layer; the restored state adds nothing to that."""
    prompt = drawn(np.random.default_rng(2), 100)
    with trivet.Runtime.load(
        group6.directory, device="cpu", limits=LIMITS, dtype="bfloat16", autostart=False
    ) as runtime:
        warm, cold = warm_and_cold(runtime, prompt)
        assert warm.logprobs is not None and cold.logprobs is not None
        assert abs(warm.logprobs[0].logprob - cold.logprobs[0].logprob) < 0.1


def test_snapshots_within_a_budget_are_whole_ones(group6: Group6) -> None:
    with load(group6.directory) as runtime:
        geometry = runtime._engine.blueprint.geometry
    one = state_layout("snapshot", geometry, 1, "float32").total_bytes
    budgets = {0: 0, one - 1: 0, one: 1, 2 * one - 1: 1, 7 * one: 7}
    assert {budget: snapshots_within(budget, geometry, "float32") for budget in budgets} == budgets
