"""A step in flight while the next is planned changes no token, and what it was too much is never seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.runtimes import assert_at_rest

import trivet
from trivet.runtime.launched import Results

LIMITS = trivet.Limits(max_requests=4, max_step_tokens=12, max_context=64, page_size=4)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 8], [9] * 20, [4], [5, 6, 7], [8] * 13]


def drive(runtime: trivet.Runtime, prompts: list[list[int]], sampling: trivet.Sampling) -> list[trivet.Completion]:
    """Serve all prompts with one step in flight."""
    handles = [runtime.submit(prompt, sampling) for prompt in prompts]
    while runtime._engine.has_work:
        runtime._step(overlap=True)
    assert not runtime._engine.busy
    return [handle.completion for handle in handles]


@pytest.mark.parametrize(
    "sampling",
    [
        trivet.Sampling(max_new_tokens=9),
        trivet.Sampling(max_new_tokens=9, temperature=0.9, seed=4, top_p=0.9, repetition_penalty=1.3, logprobs=2),
        trivet.Sampling(max_new_tokens=1),
    ],
    ids=["greedy", "drawn and penalised", "one token"],
)
def test_tokens_and_logprobs_are_those_of_steps_one_by_one(sampling: trivet.Sampling, family_checkpoint: Path) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        expected = runtime.generate(PROMPTS, sampling)
        found = drive(runtime, PROMPTS, sampling)
        assert [out.token_ids for out in found] == [out.token_ids for out in expected]
        assert [out.finish_reason for out in found] == [out.finish_reason for out in expected]
        for ours, theirs in zip(found, expected, strict=True):
            if theirs.logprobs is not None:
                assert ours.logprobs is not None
                gaps = [abs(a.logprob - b.logprob) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)]
                assert max(gaps) < 1e-3
        assert_at_rest(runtime)


def test_a_stop_ends_the_request_though_its_next_row_is_in_flight(family_checkpoint: Path) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        whole = runtime.generate([PROMPTS[0]], trivet.Sampling(max_new_tokens=12, ignore_eos=True))[0].token_ids
        last = next(place for place in range(2, 12) if whole[place] not in whole[:place])
        stopping = trivet.Sampling(max_new_tokens=12, ignore_eos=True, stop_token_ids=(whole[last],))
        handle = runtime.submit(PROMPTS[0], stopping)
        while not handle.done:
            runtime._step(overlap=True)
        assert runtime._engine.busy, "the row after the stop is in flight"
        assert runtime.stats()["requests_running"] == 0
        assert handle.completion.finish_reason == "stop"
        assert handle.completion.token_ids == whole[: last + 1]
        while runtime._engine.has_work:
            runtime._step(overlap=True)
        assert_at_rest(runtime)
        assert handle.completion.token_ids == whole[: last + 1]
        # What the row too many wrote is in no page that others find.
        longer = [*PROMPTS[0], *whole[: last + 1]]
        expected = runtime.generate([longer], trivet.Sampling(max_new_tokens=4, ignore_eos=True))[0]
        with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, prefix_cache=False) as cold:
            assert cold.generate([longer], trivet.Sampling(max_new_tokens=4, ignore_eos=True))[0].token_ids == (
                expected.token_ids
            )


def test_a_cancelled_request_gets_nothing_of_the_step_in_flight(family_checkpoint: Path) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        sampling = trivet.Sampling(max_new_tokens=20, ignore_eos=True)
        cancelled, other = (runtime.submit(prompt, sampling) for prompt in PROMPTS[:2])
        for _ in range(5):
            runtime._step(overlap=True)
        assert runtime._engine.busy
        cancelled.cancel()
        given = cancelled.completion.token_ids
        runtime._step(overlap=True)
        assert cancelled.completion.token_ids == given and cancelled.completion.finish_reason == "cancelled"
        while runtime._engine.has_work:
            runtime._step(overlap=True)
        assert len(other.completion.token_ids) == 20
        assert_at_rest(runtime)


def test_a_fault_that_shows_when_a_step_is_waited_for_ends_its_requests_alone(
    family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = trivet.Limits(max_requests=4, max_step_tokens=2, max_context=64, page_size=4)
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=limits, autostart=False) as runtime:
        sampling = trivet.Sampling(max_new_tokens=6, ignore_eos=True)
        expected = [runtime.generate([prompt], sampling)[0].token_ids for prompt in PROMPTS[:4]]
        handles = [runtime.submit(prompt, sampling) for prompt in PROMPTS[:4]]
        for _ in range(3):
            runtime._step(overlap=True)
        launched = runtime._engine._in_flight
        assert launched is not None
        with monkeypatch.context() as patch:

            def wait(results: Results) -> object:
                raise MemoryError("injected")

            patch.setattr(Results, "wait", wait)
            runtime._step(overlap=True)
        while runtime._engine.has_work:
            runtime._step(overlap=True)
        touched = {request.id for request in launched.plan.requests}
        for handle, tokens in zip(handles, expected, strict=True):
            reason = handle.completion.finish_reason
            assert reason == ("error" if handle.id in touched else "length")
            if reason == "length":
                assert handle.completion.token_ids == tokens
        assert len(touched) < len(handles)
        assert_at_rest(runtime)


def test_an_interrupt_while_a_step_is_waited_for_loses_no_step(
    family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        sampling = trivet.Sampling(max_new_tokens=6, ignore_eos=True)
        expected = runtime.generate([PROMPTS[1]], sampling)[0].token_ids
        handles = [runtime.submit(prompt, sampling) for prompt in PROMPTS[:2]]
        for _ in range(4):
            runtime._step(overlap=True)
        with monkeypatch.context() as patch:

            def wait(results: Results) -> object:
                raise KeyboardInterrupt

            patch.setattr(Results, "wait", wait)
            with pytest.raises(KeyboardInterrupt):
                runtime._step(overlap=True)
        while runtime._engine.has_work:
            runtime._step(overlap=True)
        assert all(handle.done for handle in handles)
        assert_at_rest(runtime)
        assert runtime.generate([PROMPTS[1]], sampling)[0].token_ids == expected


def test_what_a_failed_step_had_queued_is_fenced_like_any_other(
    family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        engine = runtime._engine
        ends, end = [], engine.inputs.end
        monkeypatch.setattr(engine.inputs, "end", lambda: ends.append(1) or end())
        with monkeypatch.context() as patch:

            def fetch(values: object) -> object:
                raise MemoryError("injected behind all that a step queues")

            patch.setattr(engine.inputs, "fetch", fetch)
            (out,) = runtime.generate([[1, 2, 3]], trivet.Sampling(max_new_tokens=2))
        assert out.finish_reason == "error" and ends == [1]


def test_a_report_counts_every_request_that_its_step_ended_with_an_error(
    family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        pool = runtime._engine.scheduler._holdings.pool
        handles = [runtime.submit(prompt, trivet.Sampling(max_new_tokens=4)) for prompt in PROMPTS[:3]]
        with monkeypatch.context() as patch:

            def take(count: int) -> object:
                raise MemoryError("injected")

            patch.setattr(pool, "take", take)
            failed = runtime.step().failed
        assert failed == sum(handle.completion.finish_reason == "error" for handle in handles) > 0
        runtime.run_until_idle()
        assert_at_rest(runtime)
