"""What a signal handler, the collector or an observer does within a call is done or refused, and never hangs."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.runtimes import assert_at_rest

import trivet
from trivet.plugin import hookimpl

LIMITS = trivet.Limits(max_requests=3, max_step_tokens=8, max_context=64, page_size=4)
LONG = trivet.Sampling(max_new_tokens=20)


def loaded(checkpoint: Path, **options: Any) -> trivet.Runtime:
    return trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS, **options)


class Observer:
    """Does `act` after every step."""

    def __init__(self, act: Any) -> None:
        self.act = act

    @hookimpl
    def trivet_observe_step(self, report: trivet.StepReport) -> None:
        self.act()


def test_a_cancel_in_the_middle_of_stats_is_carried_out_behind_them(
    family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(family_checkpoint, autostart=False) as runtime:
        request = runtime.submit([1, 2, 3], LONG)
        runtime.step()
        counters = runtime._engine.scheduler.counters
        during = []

        def interrupted() -> dict[str, int]:
            request.cancel()
            during.append(request.done)
            return counters()

        with monkeypatch.context() as patch:
            patch.setattr(runtime._engine.scheduler, "counters", interrupted)
            found = runtime.stats()
        assert found["requests_running"] == 1 and found["slots_total"] - found["slots_free"] == 1
        assert during == [False] and request.done
        assert_at_rest(runtime)


@pytest.mark.parametrize("autostart", [False, True])
@pytest.mark.parametrize("place", ["before", "within", "behind"])
def test_an_interrupt_while_prompts_are_queued_cancels_those_that_were(
    autostart: bool, place: str, family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(family_checkpoint, autostart=autostart) as runtime:
        scheduler = runtime._engine.scheduler
        submit, calls = scheduler.submit, 0

        def interrupted(request: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 4 and place == "before":
                raise KeyboardInterrupt
            submit(request)
            if calls == 4:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if place == "behind":
                behind = runtime._submit

                def then_interrupted(*args: Any) -> Any:
                    nonlocal calls
                    handle, calls = behind(*args), calls + 1
                    if calls == 4:
                        raise KeyboardInterrupt
                    return handle

                patch.setattr(runtime, "_submit", then_interrupted)
            else:
                patch.setattr(scheduler, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                runtime.generate([[1, 2, 3]] * 8, LONG)
        runtime.run_until_idle()
        stats = runtime.stats()
        assert stats["requests_cancelled"] == stats["requests_submitted"] == (4 if place == "behind" else 3)
        assert_at_rest(runtime)
        assert len(runtime.generate([[1, 2, 3]], LONG)[0].token_ids) == 20


@pytest.mark.parametrize("ask", ["submit", "stream", "astream"])
def test_an_interrupt_before_anybody_holds_a_request_cancels_it(
    ask: str, family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(family_checkpoint, autostart=False) as runtime:
        awake = [KeyboardInterrupt()]

        def interrupted() -> None:
            if awake:
                raise awake.pop()

        monkeypatch.setattr(runtime, "_awake", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(runtime, ask)([1, 2, 3], LONG)
        assert runtime.stats()["requests_cancelled"] == 1
        assert_at_rest(runtime)


def test_an_interrupt_of_a_call_that_changes_nothing_leaves_the_runtime_up(
    family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> dict[str, int]:
        raise KeyboardInterrupt

    with loaded(family_checkpoint, autostart=False) as runtime:
        with monkeypatch.context() as patch:
            patch.setattr(runtime._engine.scheduler, "counters", interrupted)
            with pytest.raises(KeyboardInterrupt):
                runtime.stats()
        assert len(runtime.generate([[1, 2, 3]], LONG)[0].token_ids) == 20


def test_a_change_that_an_interrupt_broke_off_is_said_at_the_next_call(
    family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with loaded(family_checkpoint, autostart=False) as runtime:
        request = runtime.submit([1, 2, 3], LONG)
        with monkeypatch.context() as patch:
            patch.setattr(runtime._engine.scheduler, "cancel", interrupted)
            with pytest.raises(KeyboardInterrupt):
                request.cancel()
        for call in (runtime.stats, lambda: runtime.submit([1]), runtime.step):
            with pytest.raises(trivet.RuntimeDown, match="KeyboardInterrupt"):
                call()
        assert request.completion.finish_reason == "cancelled"


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
def test_interrupts_at_any_instruction_of_a_cancel_leave_no_lock_behind(family_checkpoint: Path) -> None:
    armed = False

    def interrupt(*_: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    with loaded(family_checkpoint, autostart=False) as runtime:
        request = runtime.submit([1, 2, 3], LONG)
        runtime.run_until_idle()
        before = signal.signal(signal.SIGVTALRM, interrupt)
        signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4, 1e-4)
        try:
            for _ in range(300):
                with suppress(KeyboardInterrupt):
                    armed = True
                    while armed:
                        request.cancel()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        told: list[dict[str, Any]] = []
        other = threading.Thread(target=lambda: told.append(runtime.stats()), daemon=True)
        other.start()
        other.join(10)
        assert told, "the lock is held by nobody who would give it back"


@pytest.mark.parametrize("call", ["close", "step"])
@pytest.mark.parametrize("within", ["step", "stats"])
def test_what_would_wait_for_the_call_that_it_interrupts_is_refused(
    call: str, within: str, family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(family_checkpoint, autostart=False) as runtime:
        place = (runtime._engine, "step") if within == "step" else (runtime._engine.scheduler, "counters")
        inner = getattr(*place)

        def interrupted(*args: Any, **named: Any) -> Any:
            with pytest.raises(trivet.TrivetError, match="signal handler"):
                getattr(runtime, call)()
            return inner(*args, **named)

        expected = runtime.generate([[1, 2, 3]], LONG)[0].token_ids
        with monkeypatch.context() as patch:
            patch.setattr(*place, interrupted)
            assert runtime.generate([[1, 2, 3]], LONG)[0].token_ids == expected
            runtime.stats()
        assert_at_rest(runtime)


def test_observers_that_are_given_to_load_see_every_step_one_at_a_time(family_checkpoint: Path) -> None:
    inside, most, calls = 0, 0, 0

    def count() -> None:
        nonlocal inside, most, calls
        inside += 1
        most, calls = max(most, inside), calls + 1
        threading.Event().wait(0.002)
        inside -= 1

    with loaded(family_checkpoint, autostart=False, observers=[Observer(count)]) as runtime:
        requests = [runtime.submit([n, 2, 3], LONG) for n in range(3)]
        threads = [threading.Thread(target=request.wait) for request in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(request.done for request in requests)
        assert most == 1 and calls >= runtime.stats()["steps"] > 0


def test_an_observer_that_fails_is_counted_and_one_that_is_none_is_refused(family_checkpoint: Path) -> None:
    def fail() -> None:
        raise ValueError("cannot count")

    with loaded(family_checkpoint, autostart=False, observers=[Observer(fail), Observer(lambda: None)]) as runtime:
        assert runtime.stats()["observers_failed"] == 0
        runtime.generate([[1, 2, 3]], LONG)
        assert runtime.stats()["observers_failed"] == 1
    with pytest.raises(trivet.PluginError, match="object"):
        loaded(family_checkpoint, observers=[object()])
    with pytest.raises(trivet.ConfigError, match="observers is None"):
        loaded(family_checkpoint, observers=None)


@pytest.mark.parametrize("wait", ["generate", "score", "stream", "wait", "run_until_idle"])
def test_an_observer_that_waits_for_a_step_on_the_thread_that_makes_it_is_told(
    wait: str, family_checkpoint: Path
) -> None:
    told: list[BaseException] = []

    def call() -> None:
        if told:
            return
        waits = {
            "generate": lambda: runtime.generate([[1, 2]], LONG),
            "score": lambda: runtime.score([1, 2]),
            "stream": lambda: next(runtime.stream([1, 2], LONG)),
            "wait": lambda: runtime.submit([1, 2], LONG).wait(),
            "run_until_idle": runtime.run_until_idle,
        }
        try:
            waits[wait]()
        except trivet.TrivetError as error:
            told.append(error)

    with loaded(family_checkpoint, observers=[Observer(call)]) as runtime:
        request = runtime.submit([1, 2, 3], LONG)
        assert request.wait(60), "the observer hangs"
        assert "makes the steps" in str(told[0])
