"""``trivet gate`` passes an unharmed runtime, catches every fault it puts in, and fails where something is wrong."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen

from trivet.cli import main
from trivet.gate import controls
from trivet.gate.passes import passes_of
from trivet.gate.run import sizes_for
from trivet.gate.settings import GateSettings
from trivet.gate.sizes import CONTROLS_DEMAND, LONG_CONTROLS_DEMAND, demands
from trivet.layers.decoder import Decoder
from trivet.runtime import load as load_module
from trivet_qwen35.tiny import TINY_CONFIGS

MODELS = ("tiny-qwen3", "tiny-qwen35")
QUICK = ("--device", "cpu", "--dtype", "float32", "--batch", "5")
DENSE_CONTROLS = {"swapped-page", "shifted-position", "stale-row"}
HYBRID_CONTROLS = DENSE_CONTROLS | {"stale-state", "swapped-slot"}
LONG_CONTROLS = {"dense": {"long-stray-page", "long-shifted-position", "long-stale-row"}} | {
    "hybrid": {"long-stray-page", "long-stale-row", "long-stale-state", "long-swapped-slot"}
}


@frozen
class Outcome:
    code: int
    results: dict[str, Any]
    err: str

    def of(self, name: str) -> dict[str, Any]:
        """The pass or control of that name."""
        return next(outcome for outcome in self.results["outcomes"] if outcome["name"] == name)

    def verdicts(self, kind: str) -> dict[str, str]:
        return {o["name"]: o["verdict"] for o in self.results["outcomes"] if o["kind"] == kind}


@pytest.fixture
def gate(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command in this process, with its JSON."""

    def run(*arguments: object) -> Outcome:
        code = main(["gate", *map(str, arguments), "--json"])
        written = capsys.readouterr()
        return Outcome(code, json.loads(written.out) if written.out else {}, written.err)

    return run


@pytest.mark.parametrize("model", MODELS)
def test_an_unharmed_runtime_passes_and_every_fault_is_caught(
    model: str, gate: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = gate(model, *QUICK, "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    passes = outcome.verdicts("pass")
    assert set(passes) == {"sequential", "batched-5", "dropped", "warm", "mixed", "untouched"}
    assert set(passes.values()) == {"passed"}
    assert set(outcome.verdicts("control")) == (HYBRID_CONTROLS if model == "tiny-qwen35" else DENSE_CONTROLS)
    assert set(outcome.verdicts("control").values()) == {"caught"}
    assert "(0 bytes copied)" in outcome.results["reference"]
    assert outcome.of("warm")["notes"]["hit_tokens"] > 0 and outcome.of("mixed")["notes"]["mixed_steps"] > 1
    (file,) = tmp_path.glob("gate-*.json")
    record = json.loads(file.read_text())
    assert record["command"] == f"trivet gate {model} --device cpu --batch 5 --json --dtype float32"
    assert record["results"]["outcomes"] == outcome.results["outcomes"]
    for sequence in outcome.of("sequential")["sequences"]:
        assert len(sequence["token_ids"]) == len(sequence["regret"]) == len(sequence["shared"]) == 12


def test_a_wrong_rotation_fails_the_gate(gate: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(out: torch.Tensor, inverse_frequencies: Any, attention_scaling: float) -> None:
        right(out, inverse_frequencies * 1.02, attention_scaling)

    from trivet.layers import rotary

    right = rotary.fill_rotary_table
    monkeypatch.setattr(rotary, "fill_rotary_table", fill)
    outcome = gate("tiny-qwen3", *QUICK, "--pass", "sequential", "--no-controls")
    assert outcome.code == 1
    assert outcome.of("sequential")["verdict"] == "FAILED" and "gate FAILED (sequential: FAILED)" in outcome.err


def test_a_runtime_that_does_not_repeat_fails_though_it_is_near_enough(
    gate: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, right = itertools.count(), Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: right(self, hidden) * (1 + 1e-6 * (next(calls) % 7)))
    outcome = gate("tiny-qwen3", *QUICK, "--pass", "sequential", "--no-controls")
    (reason,) = outcome.of("sequential")["reasons"]
    assert outcome.code == 1 and "differ when they are served again" in reason


def test_only_the_files_show_what_the_loader_did(gate: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    right = load_module.load_parameters

    def load(*arguments: Any) -> dict[str, torch.Tensor]:
        tensors = right(*arguments)
        tensors["layers.1.mlp.gate_up.weight"].mul_(1.1)
        return tensors

    arguments = ("tiny-qwen3", *QUICK, "--pass", "sequential", "--no-controls", "--no-floor", "--reference")
    assert gate(*arguments, "files").code == 0
    monkeypatch.setattr(load_module, "load_parameters", load)
    assert gate(*arguments, "tensors").code == 0
    assert gate(*arguments, "files").code == 1


def test_a_pass_whose_subject_did_not_occur_fails(
    gate: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet.scheduler.holdings.Holdings._shares", lambda self, request: False)
    outcome = gate("tiny-qwen3", *QUICK, "--pass", "warm", "--no-controls")
    assert outcome.code == 1 and "a hit was missed" in outcome.of("warm")["reasons"][0]


def test_a_pass_alone_is_held_to_the_bounds_of_the_whole_gate(gate: Callable[..., Outcome]) -> None:
    alone, together = (
        gate("tiny-qwen35", "--device", "cpu", "--batch", "5", "--no-controls", *passes)
        for passes in (("--pass", "warm"), ("--pass", "sequential", "--pass", "warm"))
    )
    assert [*alone.verdicts("pass")] == ["warm"] and [*together.verdicts("pass")] == ["sequential", "warm"]
    assert alone.results["floor"] == together.results["floor"] is not None
    assert alone.results["bounds"] == together.results["bounds"]
    assert alone.verdicts("pass")["warm"] == together.verdicts("pass")["warm"] == "passed"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("tiny-qwen3", "--no-prefix-cache"), "the prefix cache is off"),
        (("tiny-qwen35", "--snapshot-memory", "1KiB"), "the prefix cache is off"),
        (("tiny-qwen35", "--snapshot-memory", "500KiB"), "it wants 8 snapshots of recurrent state, and there are 4"),
    ],
)
def test_without_a_prefix_cache_nothing_is_served_from_it(
    arguments: tuple[str, ...], reason: str, gate: Callable[..., Outcome]
) -> None:
    passes = ("--pass", "sequential", "--no-controls", "--no-floor")
    outcome = gate(*arguments, *QUICK, *passes)
    assert outcome.code == 0 and outcome.results["left_out"] == {"warm": reason}
    outcome = gate(*arguments, *QUICK, *passes, "--pass", "warm")
    assert outcome.code == 1 and f"the pass 'warm' cannot be served: {reason}" in outcome.err


@pytest.mark.parametrize(
    "limits", [("--snapshot-stride", 128), ("--snapshot-memory", "950KiB"), ("--max-step-tokens", 8)]
)
def test_passes_are_sized_by_what_is_asked_for(limits: tuple[object, ...], gate: Callable[..., Outcome]) -> None:
    outcome = gate("tiny-qwen35", *QUICK, *limits, "--no-controls", "--no-floor")
    assert outcome.code == 0, outcome.err
    assert set(outcome.verdicts("pass")) == {"sequential", "batched-5", "dropped", "warm", "mixed"}


@pytest.mark.parametrize(
    "limits", [("--max-requests", 1, "--kv-pages", 9), ("--page-size", 512), ("--max-context", 140)]
)
def test_limits_need_leave_room_only_for_what_is_run(limits: tuple[object, ...], gate: Callable[..., Outcome]) -> None:
    """None of these leaves room for the other passes."""
    alone = ("tiny-qwen3", "--device", "cpu", "--pass", "sequential", "--no-controls", *limits)
    outcome = gate(*alone)
    assert outcome.code == 0, outcome.err
    outcome = gate(*alone, "--pass", "mixed", "--pass", "batched-9", "--pass", "warm")
    assert outcome.code == 1 and ": the gate " in outcome.err


def test_the_floor_and_the_controls_need_room_too(gate: Callable[..., Outcome]) -> None:
    alone = ("tiny-qwen3", *QUICK, "--pass", "warm", "--max-context", 60)
    assert gate(*alone, "--no-controls", "--no-floor").code == 0
    outcome = gate(*alone, "--no-controls")
    assert outcome.code == 1 and "in sequential" in outcome.err and "--no-floor" in outcome.err
    outcome = gate(*alone, "--no-floor")
    assert outcome.code == 1 and "in controls" in outcome.err and "--no-controls" in outcome.err


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["sequential", "batched-5", "dropped", "warm", "mixed"])
def test_a_pass_needs_no_more_than_it_demands(name: str, page_size: int, gate: Callable[..., Outcome]) -> None:
    settings = GateSettings("tiny-qwen35", {}, "tensors", (5,), 12, False, (), False, False, 0)
    demand = demands(settings, 64, 145, page_size)[name]
    tight = ("--max-requests", demand.rows, "--max-context", demand.context_tokens, "--page-size", page_size)
    outcome = gate(
        "tiny-qwen35", *QUICK, *tight, "--kv-pages", demand.pages(page_size), "--pass", name, "--no-controls",
        "--no-floor",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("name", ["sequential", "mixed"])
def test_a_pass_alone_is_served_with_the_limits_of_the_whole_gate(name: str) -> None:
    whole = GateSettings("tiny-qwen3", {"device": "cpu"}, "tensors", (5,), 12, False, (), True, True, 0)
    assert sizes_for(evolve(whole, passes=(name,), controls=False, floor=False)) == sizes_for(whole)


def test_every_pass_makes_a_demand() -> None:
    settings = GateSettings("tiny-qwen3", {}, "tensors", (5, 9), 12, True, (), True, True, 0)
    assert set(demands(settings, 64, 145, 16)) == {*passes_of(settings), CONTROLS_DEMAND, LONG_CONTROLS_DEMAND}


@pytest.mark.parametrize("strikes", [True, False])
def test_a_fault_that_changes_nothing_is_not_caught(
    strikes: bool, gate: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Harmless:
        def __init__(self, *_: object) -> None: ...

        def strike(self) -> bool:
            return strikes

        def undo(self) -> None: ...

    control = evolve(controls.CONTROLS["stale-row"], make=Harmless)
    monkeypatch.setitem(controls.CONTROLS, "stale-row", control)
    outcome = gate("tiny-qwen3", *QUICK, "--pass", "sequential")
    assert outcome.code == 1
    assert outcome.of("stale-row")["verdict"] == "NOT CAUGHT" and outcome.of("swapped-page")["verdict"] == "caught"


def test_nothing_of_a_fault_is_left_behind(gate: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    last = controls.CONTROLS | {"again": controls.Control(controls.SwappedPage, lambda geometry: True)}
    seen: list[float] = []
    right = controls._serve

    def serve(bench: Any, control: Any, *size_and_subjects: Any) -> Any:
        evidence = right(bench, control, *size_and_subjects)
        if control is not None:
            clean = right(bench, None)
            from trivet.gate.compare import Compared, Figures
            from trivet.gate.reference import Reference

            reference = Reference.over_tensors(bench.runtime)
            told = [Compared.of(one, reference.tell(one.prompt, one.token_ids)) for one in clean.served]
            seen.append(Figures.of(told).largest)
        return evidence

    monkeypatch.setattr(controls, "CONTROLS", last)
    monkeypatch.setattr(controls, "_serve", serve)
    assert gate("tiny-qwen35", *QUICK, "--pass", "sequential", "--no-floor").code == 0
    assert len(seen) >= len(HYBRID_CONTROLS) and max(seen) < 1e-3


def test_a_nested_config_with_random_weights_is_enough(gate: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["multimodal"]))
    outcome = gate(tmp_path, *QUICK, "--weights", "random")
    assert outcome.code == 0, outcome.err
    assert outcome.results["tier"] == "random weights" and outcome.results["sharpened_norms"] == 2
    assert "a gate on the real checkpoint remains open" in outcome.err


@pytest.fixture(params=["dense", "hybrid"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a geometry with positions for long prompts, in ``tmp_path / "config.json"``."""
    config: dict[str, Any] = dict(TINY_CONFIGS["multimodal"]["text_config"], max_position_embeddings=16384)  # type: ignore[call-overload]
    if request.param == "dense":
        config |= {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
        config = {name: value for name, value in config.items() if not name.startswith(("linear_", "layer_types"))}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(request.param)


LONG = (*QUICK, "--weights", "random", "--long", "--max-step-tokens", 2048, "--no-floor")


@pytest.mark.parametrize("kind", ["hybrid"], indirect=True)
def test_long_prompts_are_served_in_chunks_and_side_by_side(
    kind: str, gate: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = gate(tmp_path, *LONG, "--no-controls", "--pass", "long-batched")
    assert outcome.code == 0, outcome.err
    assert {sequence["prompt_tokens"] for sequence in outcome.of("long-batched")["sequences"]} >= {4097, 8192}


def test_faults_in_a_long_row_are_caught_by_that_row_alone(
    kind: str, gate: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = gate(tmp_path, *LONG, "--pass", "sequential")
    assert outcome.code == 0, outcome.err
    caught = {name for name, verdict in outcome.verdicts("control").items() if verdict == "caught"}
    assert {name for name in caught if name.startswith("long-")} == LONG_CONTROLS[kind]
    for name in ("long-untouched", *LONG_CONTROLS[kind]):
        assert [sequence["prompt_tokens"] for sequence in outcome.of(name)["sequences"]] == [4097]


@pytest.mark.parametrize("kind", ["dense"], indirect=True)
def test_a_fault_beside_a_long_row_is_not_caught_in_it(
    kind: str, gate: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Beside(controls.StaleRow):
        """A fault in the short row that is served beside the long one."""

        def __init__(self, engine: Any, requests: Any, size: int) -> None:
            super().__init__(engine, [requests[controls.SECOND]], size)

    beside = evolve(controls.LONG_CONTROLS["long-stale-row"], make=Beside, sizes=(64,))
    monkeypatch.setattr("trivet.gate.run.LONG_CONTROLS", {"beside": beside})
    outcome = gate(tmp_path, *LONG, "--pass", "sequential")
    assert outcome.code == 1 and outcome.of("beside")["verdict"] == "NOT CAUGHT"
    assert outcome.of("beside")["notes"]["strikes"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("qwen3-14b",), 1, "geometry"),
        (("tiny-qwen3", "--weights", "random", "--reference", "files"), 1, "--reference files"),
        (("tiny-qwen3", "--long"), 1, "needs a context"),
        (("tiny-qwen3", "--pass", "sideways"), 2, "no pass is called 'sideways'"),
        (("tiny-qwen3", "--batch", "1"), 2, "at least 2"),
        (("tiny-qwen3", "--new-tokens", "3"), 2, "8"),
        (("tiny-qwen3", "--max-requests", "16"), 1, "up to 17 requests side by side, and max_requests is 16"),
        (("tiny-qwen3", "--max-step-tokens", "16"), 1, "up to 17 requests side by side, and max_step_tokens is 16"),
        (("tiny-qwen3", "--kv-pages", "40"), 1, "and kv_pages is 40: raise it"),
        (("tiny-qwen35", "--snapshot-stride", "1024"), 1, "two grains of the prefix cache in it, of 1024 tokens"),
    ],
)
def test_what_cannot_be_run_says_why(
    arguments: tuple[str, ...], code: int, words: str, gate: Callable[..., Outcome]
) -> None:
    outcome = gate(*arguments, "--device", "cpu")
    assert outcome.code == code and words in outcome.err and len(outcome.err.splitlines()) == 1
