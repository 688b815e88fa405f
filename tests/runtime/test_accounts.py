"""The accounts of who holds what are changed by one at a time, and a change that was broken off ends the runtime."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.runtimes import assert_at_rest

import trivet

LIMITS = trivet.Limits(max_requests=3, max_step_tokens=8, max_context=64, page_size=4)
LONG = trivet.Sampling(max_new_tokens=20)


@pytest.fixture
def runtime(family_checkpoint: Path) -> trivet.Runtime:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        yield runtime


class Garbage:
    """Holds a stream in a cycle, so that only the collector finds it."""

    def __init__(self, stream: object) -> None:
        self.stream = stream
        self.itself = self


@pytest.mark.parametrize("site", ["grow", "publish", "release"])
def test_a_stream_collected_in_the_middle_of_a_change_is_cancelled_and_disturbs_nothing(
    site: str, runtime: trivet.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = runtime.generate([[9] * 6], LONG)[0].token_ids
    other = runtime.submit([9] * 6, LONG)
    stream = runtime.stream([1, 2, 3, 4, 5], LONG)
    next(stream)
    request = stream.request
    holdings = runtime._engine.scheduler._holdings
    inner = getattr(holdings, site)
    garbage: list[Garbage | None] = [Garbage(stream)]
    del stream

    def collecting(*args: Any) -> Any:
        if garbage.pop() if garbage else None:
            gc.collect()
        return inner(*args)

    monkeypatch.setattr(holdings, site, collecting)
    if site == "release":
        runtime.submit([5], trivet.Sampling(max_new_tokens=1))
    while garbage:
        runtime.step()
    runtime.step()
    assert request.completion.finish_reason == "cancelled"
    runtime.run_until_idle()
    assert other.completion.token_ids == expected
    assert_at_rest(runtime)


def test_cancelling_never_waits_and_takes_effect_within_a_step(runtime: trivet.Runtime) -> None:
    request = runtime.submit([1, 2, 3], LONG)
    runtime.step()
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with runtime._engine.lock:
            entered.set()
            leave.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(20)
    request.cancel()  # would hang here
    leave.set()
    holder.join()
    runtime.step()
    assert request.completion.finish_reason == "cancelled"
    assert_at_rest(runtime)


def test_a_request_that_was_cancelled_before_the_runtime_closes_ends_as_cancelled(runtime: trivet.Runtime) -> None:
    cancelled, other = (runtime.submit([1, 2, 3], LONG) for _ in range(2))
    runtime._engine._cancelled.append(cancelled._scheduled)
    runtime.close()
    assert cancelled.completion.finish_reason == "cancelled"
    assert isinstance(other.completion.error, trivet.RuntimeDown)


@pytest.mark.parametrize("error", [ValueError("half way"), KeyboardInterrupt()])
@pytest.mark.parametrize("method", ["schedule", "complete"])
def test_a_change_that_was_broken_off_turns_the_runtime_down(
    method: str, error: BaseException, runtime: trivet.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = runtime.submit([1, 2, 3], LONG)

    def broken(*args: Any) -> None:
        raise error

    monkeypatch.setattr(runtime._engine.scheduler, method, broken)
    with pytest.raises(type(error)):
        runtime.step()
    assert isinstance(request.completion.error, trivet.RuntimeDown)
    for call in (runtime.step, runtime.stats, runtime.run_until_idle, lambda: runtime.submit([1])):
        with pytest.raises(trivet.RuntimeDown, match=type(error).__name__):
            call()


@pytest.mark.parametrize("autostart", [False, True])
def test_a_reader_whose_event_loop_is_gone_harms_nobody(autostart: bool, family_checkpoint: Path) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=autostart) as runtime:
        with runtime._engine.lock:  # so that nothing of it is computed while its loop lives

            async def leave() -> object:
                return runtime.astream([1, 2, 3], trivet.Sampling(max_new_tokens=3))

            stream: Any = asyncio.run(leave())
        assert len(runtime.generate([[4, 5]], trivet.Sampling(max_new_tokens=8))[0].token_ids) == 8
        assert stream.request.completion.finish_reason == "length"


def test_a_step_reports_the_tokens_that_were_given(runtime: trivet.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, other = runtime.submit([1], LONG), runtime.submit([2], LONG)
    assert runtime.step().new_tokens == 2
    owner = next(iter(runtime._engine.owners.values()))
    attend = owner.attend

    def cancelling(*args: Any) -> Any:
        victim.cancel()
        return attend(*args)

    monkeypatch.setattr(owner, "attend", cancelling)
    assert runtime.step().new_tokens == 1
    assert len(other.completion.token_ids) == 2


def test_counters_can_be_read_while_another_thread_closes(
    runtime: trivet.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = runtime._engine.scheduler.counters

    def closing() -> dict[str, int]:
        closer = threading.Thread(target=runtime._engine.close)
        closer.start()
        closer.join()
        return counters()

    monkeypatch.setattr(runtime._engine.scheduler, "counters", closing)
    assert runtime.stats()["requests_running"] == 0
