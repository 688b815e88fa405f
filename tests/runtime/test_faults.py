"""A fault in a step ends the requests it touched and nobody else; a lost device ends the runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.runtimes import assert_at_rest

import trivet

LIMITS = trivet.Limits(max_requests=4, max_step_tokens=12, max_context=64, page_size=4)
SAMPLING = trivet.Sampling(max_new_tokens=6, temperature=0.8, seed=3, logprobs=1)

SITES = [
    "attention.update",
    "attention.append",
    "attention.attend",
    "model.forward",
    "model.logits",
    "state.clear",
    "state.save",
    "state.restore",
    "sampler.bind",
    "sampler.groups",
    "sampler.accept",
    "inputs",
    "pages.take",
    "slots.take",
    "prefix.match",
    "prefix.publish",
    "snapshots.take",
    "snapshots.attach",
    "snapshots.hold",
    "gate.reserve",
]


def site_of(runtime: trivet.Runtime, site: str) -> tuple[Any, str]:
    """The object and attribute that `site` names."""
    engine = runtime._engine
    owner = next(iter(engine.owners.values()))
    return {
        "attention.update": (owner, "update"),
        "attention.append": (owner, "append"),
        "attention.attend": (owner, "attend"),
        "model.forward": (engine, "model"),
        "model.logits": (engine.model, "logits"),
        "state.clear": (engine.state, "clear"),
        "state.save": (engine.state, "save"),
        "state.restore": (engine.state, "restore"),
        "sampler.bind": (engine.sampling, "bind"),
        "sampler.groups": (engine.sampling, "groups"),
        "sampler.accept": (engine.sampling, "accept"),
        "inputs": (engine.inputs, "fill"),
        "pages.take": (engine.scheduler._holdings.pool, "take"),
        "slots.take": (engine.scheduler._holdings.slots, "take"),
        "prefix.match": (engine.scheduler._holdings.prefix, "match"),
        "prefix.publish": (engine.scheduler._holdings.prefix, "publish"),
        "snapshots.take": (engine.scheduler._holdings.shelf, "take"),
        "snapshots.attach": (engine.scheduler._holdings.shelf, "attach"),
        "snapshots.hold": (engine.scheduler._holdings.shelf, "hold"),
        "gate.reserve": (engine.scheduler._holdings.gate, "reserve"),
    }[site]


class FailsOnce:
    """Raises on call number `at`, and passes every other call on."""

    def __init__(self, inner: Callable[..., Any], at: int, error: BaseException) -> None:
        self.inner, self.left, self.error, self.raised = inner, at, error, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self.raised = True
            raise self.error
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("site", SITES)
def test_a_fault_at_any_call_site_ends_its_step_and_the_rest_is_unchanged(
    site: str, overlap: bool, family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 8], [9] * 20]
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        if site.startswith(("state", "snapshots")) and runtime._engine.state is None:
            pytest.skip("a dense model has no state")
        expected = [runtime.generate([prompt], SAMPLING)[0].token_ids for prompt in prompts]
        faults = 0
        for call in (1, 2, 3):
            target, name = site_of(runtime, site)
            fault = FailsOnce(getattr(target, name), call, MemoryError(f"injected at {site}"))
            with monkeypatch.context() as patch:
                patch.setattr(target, name, fault)
                handles = [runtime.submit(prompt, SAMPLING) for prompt in prompts]
                while runtime._engine.has_work:
                    runtime._step(overlap=overlap)
                outs = [handle.completion for handle in handles]
            failed = [out for out in outs if out.finish_reason == "error"]
            # What cannot be offered to others is the request's own still.
            assert bool(failed) == (fault.raised and site not in ("prefix.publish", "snapshots.attach"))
            faults += fault.raised
            for out, tokens in zip(outs, expected, strict=True):
                if out.finish_reason == "error":
                    assert isinstance(out.error, MemoryError)
                    assert out.token_ids == tokens[: len(out.token_ids)]
                else:
                    assert out.token_ids == tokens
            assert_at_rest(runtime)
        assert faults, "the site was never reached"
        assert [runtime.generate([prompt], SAMPLING)[0].token_ids for prompt in prompts] == expected


def test_requests_outside_the_failed_step_go_on(family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = trivet.Limits(max_requests=3, max_step_tokens=1, max_context=64, page_size=4)
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=limits, autostart=False) as runtime:
        prompts = [[1, 2], [3, 4], [5, 6]]
        expected = [runtime.generate([prompt], SAMPLING)[0].token_ids for prompt in prompts]
        handles = [runtime.submit(prompt, SAMPLING) for prompt in prompts]
        for _ in range(4):
            runtime.step()
        owner = next(iter(runtime._engine.owners.values()))
        with monkeypatch.context() as patch:
            patch.setattr(owner, "attend", FailsOnce(owner.attend, 1, RuntimeError("once")))
            report = runtime.step()
        assert report.failed == 1
        runtime.run_until_idle()
        reasons = [handle.completion.finish_reason for handle in handles]
        assert sorted(reasons) == ["error", "length", "length"]
        for handle, tokens in zip(handles, expected, strict=True):
            if handle.completion.finish_reason == "length":
                assert handle.completion.token_ids == tokens
        assert_at_rest(runtime)


def test_a_row_with_nan_logits_ends_alone(family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        prompts = [[1, 2], [3, 4], [5, 6]]
        expected = [runtime.generate([prompt], SAMPLING)[0].token_ids for prompt in prompts]
        logits_of = runtime._engine.model.logits
        calls = 0

        def poisoned(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            logits = logits_of(hidden)
            if calls == 3:
                logits[1] = float("nan")
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(runtime._engine.model, "logits", poisoned)
            outs = runtime.generate(prompts, SAMPLING)
        assert [out.finish_reason for out in outs] == ["length", "error", "length"]
        assert "NaN" in str(outs[1].error)
        assert outs[1].token_ids == expected[1][:2]
        assert (outs[0].token_ids, outs[2].token_ids) == (expected[0], expected[2])
        assert_at_rest(runtime)
        assert runtime.generate([prompts[1]], SAMPLING)[0].token_ids == expected[1], "a poisoned page was published"


def test_a_failed_score_raises_its_cause(family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        owner = next(iter(runtime._engine.owners.values()))
        with monkeypatch.context() as patch:
            patch.setattr(owner, "attend", FailsOnce(owner.attend, 1, RuntimeError("once")))
            with pytest.raises(RuntimeError, match="once"):
                runtime.score([1, 2, 3])
        assert len(runtime.score([1, 2, 3])) == 2
        assert_at_rest(runtime)


def test_each_reader_of_a_failed_step_raises_an_error_of_its_own_that_names_the_cause(
    family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = ValueError("once")
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        owner = next(iter(runtime._engine.owners.values()))
        streams = [runtime.stream([1, 2, 3], SAMPLING) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(owner, "attend", FailsOnce(owner.attend, 1, cause))
            runtime.step()
        raised = []
        for stream in streams:
            with pytest.raises(trivet.StepFailed, match="ValueError: once") as failure:
                next(stream)
            assert failure.value.__cause__ is cause is stream.request.completion.error
            raised.append(failure.value)
        assert raised[0] is not raised[1]


def test_readers_of_a_runtime_that_is_closed_raise_errors_of_their_own(family_checkpoint: Path) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        streams = [runtime.stream([1, 2, 3], SAMPLING) for _ in range(2)]
    raised = []
    for stream in streams:
        with pytest.raises(trivet.RuntimeDown, match="closed") as failure:
            next(stream)
        raised.append(failure.value)
    assert raised[0] is not raised[1]


@pytest.mark.parametrize("autostart", [False, True])
def test_a_lost_device_turns_the_runtime_down_and_every_call_says_so(
    autostart: bool, family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=autostart) as runtime:
        owner = next(iter(runtime._engine.owners.values()))
        lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        monkeypatch.setattr(owner, "attend", FailsOnce(owner.attend, 1, lost))
        with runtime._engine.lock:  # so that the thread does not fall before both are submitted
            out = runtime.submit([1, 2, 3], SAMPLING)
            waiting = runtime.submit([4] * 20, SAMPLING)
        if not autostart:
            runtime.step()
        assert out.wait(20) and waiting.wait(20)
        assert out.completion.finish_reason == waiting.completion.finish_reason == "error"
        for call in (
            lambda: runtime.generate([[1]]),
            lambda: runtime.submit([1]),
            lambda: runtime.score([1, 2]),
            lambda: runtime.stream([1]),
            runtime.step,
            runtime.stats,
        ):
            with pytest.raises(trivet.RuntimeDown, match="illegal memory access"):
                call()


def test_an_interrupt_in_a_step_reaches_the_caller_and_leaves_the_runtime_serving(
    family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        expected = runtime.generate([[1, 2, 3]], SAMPLING)[0].token_ids
        owner = next(iter(runtime._engine.owners.values()))
        with monkeypatch.context() as patch:
            patch.setattr(owner, "attend", FailsOnce(owner.attend, 2, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                runtime.generate([[1, 2, 3]], SAMPLING)
        assert_at_rest(runtime)
        assert runtime.generate([[1, 2, 3]], SAMPLING)[0].token_ids == expected


@pytest.mark.parametrize("site", ["_complete", "_report", "_compute"])
def test_an_interrupt_that_loses_a_step_takes_the_runtime_down_and_leaves_nobody_waiting(
    family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    def interrupted(*arguments: object) -> None:
        engine._in_flight = None if site == "_complete" else engine._in_flight
        raise KeyboardInterrupt

    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        engine, request = runtime._engine, runtime.submit([1, 2, 3], SAMPLING)
        monkeypatch.setattr(engine, site, interrupted)
        with pytest.raises(KeyboardInterrupt):
            runtime.step()
        monkeypatch.undo()
        if site == "_complete":
            with pytest.raises(trivet.RuntimeDown):
                runtime.run_until_idle()
            assert request.done and request.completion.finish_reason == "error"
        else:  # the plan was accounted for, or its requests ended
            runtime.run_until_idle()
            assert request.done
            assert_at_rest(runtime)
