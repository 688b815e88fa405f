"""``bench decode``: interleaved pairs, every raw sample, and counts that tell an owned plan from a fresh one."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.runtimes import FAMILIES

import trivet
from trivet.attention.reference.owner import ReferenceOwner
from trivet.attention.reference.path import ReferencePath
from trivet.bench.arms import ARMS, Arm
from trivet.bench.counters import Counter
from trivet.bench.figures import Figures
from trivet.bench.peer import SINGLE_TURNS, Peer, Requests

Run = Callable[..., Any]

PAIRS, ITERATIONS = 2, 4
ARRAYS = 11
"""Buffers of the reference plan."""


@pytest.fixture
def arms(bench: Run, checkpoints: dict[str, Path], request: pytest.FixtureRequest) -> Any:
    """The outcome of both arms at two batch sizes."""
    model = checkpoints[request.param]
    options = {"model": model, "batch": "1,3", "context": 6, "pairs": PAIRS, "iterations": ITERATIONS}
    outcome = bench("decode", "--arm", "owned,fresh", *(x for k, v in options.items() for x in (f"--{k}", v)))
    assert outcome.code == 0, outcome.err
    return outcome


@pytest.mark.parametrize("arms", FAMILIES, indirect=True)
def test_an_owned_plan_allocates_nothing_and_a_fresh_one_all_its_arrays(arms: Any) -> None:
    for batch in arms.record["results"]["batches"]:
        owned, fresh = (batch["arms"][name]["counts_per_step"] for name in ("owned", "fresh"))
        assert (owned["allocations"], owned["frees"]) == (0, 0)
        assert (fresh["allocations"], fresh["frees"]) == (ARRAYS, ARRAYS)
        assert (owned["plan_allocations"], fresh["plan_allocations"]) == (0, ARRAYS)
        for name, expected in (("owned", 0), ("fresh", ARRAYS)):
            assert set(batch["arms"][name]["plan_allocations"]) == {expected}
        for name, expected in (("owned", 0), ("fresh", ARRAYS * ITERATIONS)):
            assert [pair["device_allocations"] for pair in batch["arms"][name]["pairs"]] == [expected] * PAIRS


@pytest.mark.parametrize("arms", ["qwen3"], indirect=True)
def test_every_raw_sample_is_kept_and_the_medians_follow_from_them(arms: Any) -> None:
    assert [batch["batch"] for batch in arms.record["results"]["batches"]] == [1, 3]
    for batch in arms.record["results"]["batches"]:
        for arm in batch["arms"].values():
            assert len(arm["pairs"]) == PAIRS
            for pair in arm["pairs"]:
                assert [len(pair[name]) for name in ("wall_ms", "cpu_ms", "plan_cpu_ms")] == [ITERATIONS] * 3
                assert all(sample > 0 for sample in pair["wall_ms"])
                assert pair["figures"]["p95"] == pytest.approx(Figures.of(pair["wall_ms"]).p95, abs=1e-4)
            p50 = statistics.median(Figures.of(pair["wall_ms"]).p50 for pair in arm["pairs"])
            assert arm["medians"]["p50"] == pytest.approx(p50, abs=1e-4)
            plan = statistics.median(statistics.fmean(pair["plan_cpu_ms"]) for pair in arm["pairs"])
            assert arm["medians"]["plan_cpu_mean"] == pytest.approx(plan, abs=1e-4)


@pytest.mark.parametrize("arms", ["qwen3"], indirect=True)
def test_the_tables_show_each_pair_and_the_medians(arms: Any) -> None:
    rows = [line.split("|")[1:-1] for line in arms.out.splitlines() if line.startswith("|")]
    pairs = [(row[0].strip(), row[1].strip()) for row in rows if row[0].strip().isdigit()]
    assert pairs == 2 * [(str(pair), arm) for pair in (1, 2) for arm in ("owned", "fresh")]
    header = next([cell.strip() for cell in row] for row in rows if row[0].strip() == "arm")
    medians = [dict(zip(header, map(str.strip, row), strict=True)) for row in rows if len(row) == len(header)]
    planned = [(row["arm"], row["plan allocations"], row["launches"]) for row in medians if row["arm"] in ARMS]
    assert planned == 2 * [("owned", "0", "-"), ("fresh", str(ARRAYS), "-")], "nothing is launched on a CPU"
    assert sum(row[0].strip() == "owned" for row in rows) == 2, "a row of medians for each batch size"


def test_arms_take_turns_and_which_comes_first_alternates(
    bench: Run, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[str] = []
    enter = Arm.__enter__
    monkeypatch.setattr(Arm, "__enter__", lambda arm: (entered.append(arm.name), enter(arm))[1])
    options = ("--batch", "1", "--context", "3", "--pairs", "3", "--iterations", "1")
    assert bench("decode", "--model", checkpoints["qwen3"], "--arm", "owned,fresh", *options).code == 0
    warm_up, pairs = entered[:2], entered[2:]
    assert warm_up == ["owned", "fresh"]
    assert pairs == ["owned", "fresh", "fresh", "owned", "owned", "fresh"]


def test_both_arms_give_the_tokens_of_the_runtime_itself(checkpoints: dict[str, Path]) -> None:
    limits = trivet.Limits(max_requests=3, max_step_tokens=8, max_context=64, page_size=4)
    prompts, sampling = [[1, 2, 3], [4] * 9, [5, 6]], trivet.Sampling(max_new_tokens=8, ignore_eos=True)
    with trivet.Runtime.load(checkpoints["qwen3"], device="cpu", limits=limits, autostart=False) as runtime:
        expected = [out.token_ids for out in runtime.generate(prompts, sampling)]
        for name in ("owned", "fresh"):
            arm = Arm(name, runtime._engine, runtime._meter)
            with arm:
                assert [out.token_ids for out in runtime.generate(prompts, sampling)] == expected
            arm.close()
        assert [out.token_ids for out in runtime.generate(prompts, sampling)] == expected, "the engine's own is back"


def test_what_a_step_allocates_beside_its_plan_is_no_allocation_of_the_plan(checkpoints: dict[str, Path]) -> None:
    limits = trivet.Limits(max_requests=2, max_step_tokens=8, max_context=64, page_size=4)
    with trivet.Runtime.load(checkpoints["qwen3"], device="cpu", limits=limits, autostart=False) as runtime:
        counter = Counter(runtime._engine.inputs["token_ids"].device, runtime._meter, lambda: 0)
        for name, expected in (("owned", 0), ("fresh", ARRAYS)):
            arm = Arm(name, runtime._engine, runtime._meter)
            request = runtime.submit([1, 2, 3], trivet.Sampling(max_new_tokens=9, ignore_eos=True))
            with arm, arm.counting(counter.allocated) as plan_allocations:
                for _ in range(4):
                    runtime.step()
                    runtime._meter.record(1)
            with arm:
                runtime.step()
            assert plan_allocations == [expected] * 4, "and nothing is counted afterwards"
            request.cancel()
            runtime.run_until_idle()
            arm.close()


class OwnerOfAnotherPath(ReferenceOwner):
    """Offers no like owner."""

    like = None


@pytest.mark.parametrize("owner", [ReferenceOwner, OwnerOfAnotherPath])
def test_a_fresh_plan_is_bound_by_its_path_only_where_its_owner_offers_no_like_one(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, owner: type[ReferenceOwner]
) -> None:
    limits = trivet.Limits(max_requests=2, max_step_tokens=8, max_context=64, page_size=4)
    bound: list[Any] = []
    monkeypatch.setattr(ReferencePath, "bind", lambda path, *given: (bound.append(given), owner(*given))[1])
    with trivet.Runtime.load(checkpoints["qwen3"], device="cpu", limits=limits, autostart=False) as runtime:
        bound.clear()
        arm = Arm("fresh", runtime._engine, runtime._meter)
        before = runtime._meter.allocations
        with arm:
            runtime.generate([[1, 2, 3]], trivet.Sampling(max_new_tokens=4, ignore_eos=True))
        assert runtime._meter.allocations - before == 4 * ARRAYS
        assert len(bound) == (0 if owner is ReferenceOwner else 5), "one of each step, and the one before the first"
        arm.close()


@pytest.mark.parametrize(("arms", "graphs"), [("owned", None), ("fresh", False), ("owned,fresh", False)])
def test_graphs_are_off_where_plans_are_fresh_and_left_as_asked_for_where_they_are_owned(
    bench: Run, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, arms: str, graphs: bool | None
) -> None:
    given: list[Any] = []
    load = trivet.Runtime.load
    monkeypatch.setattr(
        trivet.Runtime, "load", lambda *model, **options: (given.append(options), load(*model, **options))[1]
    )
    options = ("--batch", "1", "--context", "3", "--pairs", "1", "--iterations", "1")
    assert bench("decode", "--model", checkpoints["qwen3"], "--arm", arms, *options).code == 0
    assert [options.get("cuda_graphs") for options in given] == [graphs]


def test_requests_that_cannot_decode_side_by_side_are_an_error(bench: Run, checkpoints: dict[str, Path]) -> None:
    outcome = bench("decode", "--model", checkpoints["qwen3"], "--batch", "2", "--context", "5", "--max-requests", "1")
    assert outcome.code == 1 and outcome.record is None
    assert "never decoded together" in outcome.err and outcome.err.count("\n") == 1


PEER = ("--peer", "transformers", "--dtype", "float32", "--pairs", "2", "--context", "5", "--new-tokens", "3")
MIXED = ("--requests", "3", "--mixed-prompt", "2-6", "--mixed-new", "1-4")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_peer_is_compared_in_tokens_first_and_then_in_interleaved_pairs(
    bench: Run, checkpoints: dict[str, Path], family: str
) -> None:
    outcome = bench("decode", "--model", checkpoints[family], *PEER, *MIXED)
    assert outcome.code == 0, outcome.err
    results = outcome.record["results"]
    assert results["equality"]["requests"] == 4
    assert results["equality"]["equal"] + results["equality"]["ties"] == 4
    single, mixed = results["runs"]["one request"], results["runs"]["mixed requests"]
    for turns in single:
        orders = [[run["side"] for run in turn] for turn in turns]
        assert orders[:2] == [["trivet", "one by one"], ["one by one", "trivet"]] and len(orders) == SINGLE_TURNS
    assert [pair[0]["side"] for pair in mixed] == ["trivet", "one by one"], "another side comes first in each pair"
    for pair in mixed:
        assert len({run["tokens"] for run in pair}) == 1, "every side gives the same number of tokens"
        assert {run["side"] for run in pair} == {"trivet", "one by one", "padded batch"}
    for found in results["comparisons"].values():
        assert found["median_ratio"] == statistics.median(found["ratios"]) and len(found["ratios"]) == 2
    assert outcome.out.count("one request") == 3, "two pairs and their median"


def test_other_tokens_than_the_peer_s_are_an_error(
    bench: Run, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Peer.one_by_one

    def wrong(peer: Peer, requests: Requests) -> list[list[int]]:
        answers = honest(peer, requests)
        answers[0][1] = (answers[0][1] + 1) % 90
        return answers

    monkeypatch.setattr(Peer, "one_by_one", wrong)
    outcome = bench("decode", "--model", checkpoints["qwen3"], *PEER, *MIXED)
    assert outcome.code == 1 and outcome.record is None
    assert "new token 1 of a prompt of 5 tokens" in outcome.err
