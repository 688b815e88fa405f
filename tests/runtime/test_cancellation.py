"""Cancelling at any time gives everything back within a step; closing ends what is open."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tests.support.runtimes import assert_at_rest

import trivet

LIMITS = trivet.Limits(max_requests=2, max_step_tokens=8, max_context=64, page_size=4)
LONG = trivet.Sampling(max_new_tokens=30)


@pytest.fixture
def runtime(family_checkpoint: Path) -> trivet.Runtime:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        yield runtime


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 9])
def test_cancelled_at_any_point_everything_is_back_within_a_step(steps: int, runtime: trivet.Runtime) -> None:
    expected = runtime.generate([[9] * 7], trivet.Sampling(max_new_tokens=12))[0].token_ids
    victim = runtime.submit(list(range(20)), LONG)
    other = runtime.submit([9] * 7, trivet.Sampling(max_new_tokens=12))
    waiting = runtime.submit([5], LONG)
    for _ in range(steps):
        runtime.step()
    victim.cancel()
    victim.cancel()
    waiting.cancel()
    runtime.step()
    assert victim.done and victim.completion.finish_reason == "cancelled"
    frozen = victim.completion
    runtime.run_until_idle()
    assert victim.completion is frozen
    assert other.completion.token_ids == expected
    other.cancel()
    assert other.completion.finish_reason == "length"
    assert_at_rest(runtime)


def test_cancelled_while_its_step_is_in_flight_emits_nothing_more(
    runtime: trivet.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = runtime.submit([1, 2, 3], LONG)
    runtime.step()
    given = len(handle.completion.token_ids)
    owner = next(iter(runtime._engine.owners.values()))
    attend = owner.attend

    def cancelling(*args: object) -> object:
        handle.cancel()
        return attend(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, "attend", cancelling)
        runtime.step()
    assert handle.completion.finish_reason == "cancelled"
    assert len(handle.completion.token_ids) == given
    assert_at_rest(runtime)


def test_closing_or_dropping_a_stream_cancels_its_request(runtime: trivet.Runtime) -> None:
    stream = runtime.stream([1, 2, 3], LONG)
    next(stream)
    stream.close()
    assert stream.request.completion.finish_reason == "cancelled"
    assert next(stream, None) is None
    dropped = runtime.stream([1, 2, 3], LONG)
    next(dropped)
    request = dropped.request
    del dropped
    assert request.completion.finish_reason == "cancelled"
    unread = runtime.stream([1, 2, 3], LONG).request
    assert unread.completion.finish_reason == "cancelled"
    runtime.step()
    assert_at_rest(runtime)


@pytest.mark.parametrize("autostart", [False, True])
def test_asyncio_streams_and_cancels(autostart: bool, family_checkpoint: Path) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=autostart) as runtime:
        expected = runtime.generate([[1, 2, 3]], trivet.Sampling(max_new_tokens=8))[0].token_ids

        async def whole() -> list[int]:
            return [t.token_id async for t in runtime.astream([1, 2, 3], trivet.Sampling(max_new_tokens=8))]

        async def cancelled() -> trivet.Request:
            stream = runtime.astream([1, 2, 3], trivet.Sampling(max_new_tokens=60))

            async def read() -> None:
                async for _ in stream:
                    await asyncio.sleep(0)

            task = asyncio.create_task(read())
            while len(stream.request.completion.token_ids) < 2:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return stream.request

        async def both() -> list[list[int]]:
            return await asyncio.gather(whole(), whole(), whole())

        assert asyncio.run(both()) == [list(expected)] * 3
        request = asyncio.run(cancelled())
        assert request.wait(10) and request.completion.finish_reason in ("cancelled", "length")
        assert request.completion.finish_reason == "cancelled"
        runtime.run_until_idle()
        assert_at_rest(runtime)


@pytest.mark.parametrize("autostart", [False, True])
def test_an_asyncio_stream_may_be_made_outside_a_loop_and_read_in_several(
    autostart: bool, family_checkpoint: Path
) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=autostart) as runtime:
        stream = runtime.astream([1, 2, 3], trivet.Sampling(max_new_tokens=8))

        async def read(count: int) -> list[int]:
            return [(await anext(stream)).token_id for _ in range(count)]

        tokens = asyncio.run(read(3)) + asyncio.run(read(5))
        assert tokens == list(runtime.generate([[1, 2, 3]], trivet.Sampling(max_new_tokens=8))[0].token_ids)


def test_close_ends_open_requests_with_runtime_down_and_joins_its_thread(family_checkpoint: Path) -> None:
    runtime = trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS)
    thread = runtime._thread
    handles = [runtime.submit([1, 2], LONG) for _ in range(6)]
    runtime.close()
    runtime.close()
    assert thread is not None and not thread.is_alive()
    for handle in handles:
        assert handle.done
        if handle.completion.finish_reason != "length":
            assert isinstance(handle.completion.error, trivet.RuntimeDown)
        handle.cancel()
    for call in (runtime.stats, runtime.step, lambda: runtime.submit([1]), lambda: runtime.generate([[1]])):
        with pytest.raises(trivet.RuntimeDown, match="closed"):
            call()
    for line, buffers in runtime._engine.owned.items():
        assert buffers.storage_bytes == 0, line


def test_a_waiting_generate_ends_when_another_thread_closes(family_checkpoint: Path) -> None:
    runtime = trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS)
    outs: list[trivet.Completion] = []
    started = threading.Event()

    def wait() -> None:
        started.set()
        outs.extend(runtime.generate([[1, 2]] * 5, trivet.Sampling(max_new_tokens=60)))

    waiter = threading.Thread(target=wait)
    waiter.start()
    started.wait()
    while not runtime.stats()["requests_submitted"]:
        pass
    runtime.close()
    waiter.join(20)
    assert not waiter.is_alive()


def test_stepping_with_nothing_to_do_returns_at_once(runtime: trivet.Runtime) -> None:
    report = runtime.step()
    assert (report.path, report.prefill_tokens, report.decode_tokens) == ("idle", 0, 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_text_that_waited_for_a_stop_string_is_in_the_completion_of_a_cancelled_request(
    overlap: bool, text_checkpoint: Path
) -> None:
    with trivet.Runtime.load(text_checkpoint, device="cpu", autostart=False) as runtime:
        plain = runtime.generate([[5, 6, 7]], trivet.Sampling(max_new_tokens=3, ignore_eos=True))[0]
        assert runtime.tokenizer is not None
        last = runtime.tokenizer.decode([plain.token_ids[2]])
        stop = (last + "and then something that never comes",)
        request = runtime.submit([5, 6, 7], trivet.Sampling(max_new_tokens=30, ignore_eos=True, stop=stop))
        while len(request.completion.token_ids) < 3:
            runtime._step(overlap=overlap)
        request.cancel()
        runtime.run_until_idle()
        completion = request.completion
        assert completion.finish_reason == "cancelled"
        assert completion.text == runtime.tokenizer.decode(list(completion.token_ids))
