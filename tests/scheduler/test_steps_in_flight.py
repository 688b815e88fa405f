"""Steps fail, requests are cancelled while a step runs, and a step is scheduled before the last one is known."""

from __future__ import annotations

import pytest
from tests.scheduler.fake_engine import World, audit, solo_run

from trivet.capacity import Limits
from trivet.errors import AccountingError
from trivet.scheduler import Ending, Request


def world_of(snapshots: int | None = None, step_tokens: int = 16) -> World:
    return World.of(Limits(4, step_tokens, 64, 4), 40, snapshots=snapshots)


def test_a_failed_step_ends_the_requests_it_touched_and_no_others() -> None:
    world = World.of(Limits(4, 2, 64, 4), 40)
    requests = [world.submit([seed, seed], 6) for seed in range(4)]
    for _ in range(5):
        world.step()
    plan = world.launch()
    assert plan is not None
    error = RuntimeError("out of memory")
    ended = world.land(error=error)
    assert set(ended) == set(plan.requests) and len(ended) == 2
    world.drain(audited=True)
    for request in requests:
        answer = request.new_token_ids
        assert answer == solo_run([request.id, request.id], len(answer))
        if request in ended:
            assert request.finish_reason == "error" and request.error is error
        else:
            assert request.finish_reason == "length"


@pytest.mark.parametrize("snapshots", [None, 3])
def test_a_request_cancelled_in_flight_is_released_when_the_step_completes(snapshots: int | None) -> None:
    world = world_of(snapshots)
    request = world.submit([1] * 9, 8)
    world.step()
    world.step()
    before = request.new_token_ids
    world.launch()
    assert world.scheduler.cancel(request)
    assert request.done and request.pages and request.slot != -1
    audit(world)
    assert world.land() == []
    audit(world)
    assert request.new_token_ids == before
    assert not request.pages
    assert world.scheduler.counters()["slots_free"] == 4


def test_a_waiting_request_is_cancelled_without_a_step() -> None:
    world = world_of()
    request = world.submit([1], 1)
    assert world.scheduler.cancel(request)
    assert not world.scheduler.has_work
    assert world.launch() is None


def test_an_unknown_request_that_was_never_submitted_may_be_cancelled() -> None:
    world = world_of()
    stranger = Request(99, [1], 1)
    assert world.scheduler.cancel(stranger)
    assert not world.scheduler.cancel(stranger)
    assert world.scheduler.counters() == world_of().scheduler.counters()


@pytest.mark.parametrize("snapshots", [None, 3])
def test_steps_scheduled_ahead_give_the_same_answers(snapshots: int | None) -> None:
    world = world_of(snapshots)
    prompts = [[seed] * (3 + 5 * seed) for seed in range(6)]
    requests = [world.submit(prompt, 12) for prompt in prompts]
    carried = 0
    world.launch()
    while world.scheduler.has_work:
        plan = world.launch()
        carried += len(plan.carried_rows) if plan is not None else 0
        world.land()
        audit(world)
    assert carried
    assert [request.new_token_ids for request in requests] == [solo_run(prompt, 12) for prompt in prompts]


def test_a_request_that_stops_with_a_later_step_in_flight_takes_nothing_from_it() -> None:
    world = world_of()
    request = world.submit([5] * 3, 20)
    world.launch()
    world.land()
    world.launch()
    world.launch()
    assert world.land(endings=lambda request: Ending("stop")) == [request]
    assert request.pages, "its pages are still written to by the step in flight"
    assert world.land() == []
    audit(world)
    assert request.finish_reason == "stop"
    assert request.new_token_ids == solo_run([5] * 3, 2)
    assert not request.pages


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    world = world_of()
    request = world.submit([5] * 3, 1)
    world.step(endings=lambda request: Ending("stop"))
    assert request.finish_reason == "stop"


def test_an_unusable_row_ends_its_request_and_no_other() -> None:
    world = world_of()
    bad, good = world.submit([1] * 3, 8), world.submit([2] * 3, 8)
    world.step()
    cause = ValueError("NaN")
    world.step(endings=lambda request: Ending("error", cause) if request is bad else None)
    world.drain(audited=True)
    assert (bad.finish_reason, bad.error, bad.new_tokens) == ("error", cause, 1)
    assert (good.finish_reason, good.new_token_ids) == ("length", solo_run([2] * 3, 8))


def test_steps_are_closed_once_and_in_order() -> None:
    world = world_of()
    world.submit([1], 8)
    first, second = world.launch(), world.launch()
    assert first is not None and second is not None
    with pytest.raises(AccountingError, match="out of turn"):
        world.scheduler.complete(second, [0])
    world.scheduler.complete(first, [0])
    with pytest.raises(AccountingError, match="out of turn"):
        world.scheduler.fail(first, RuntimeError())


def test_a_step_is_completed_with_a_token_for_each_sampling_row() -> None:
    world = world_of()
    world.submit([1], 8)
    plan = world.launch()
    assert plan is not None
    with pytest.raises(AccountingError, match="2 new tokens for 1 sampling row"):
        world.scheduler.complete(plan, [0, 1])


def test_fresh_slots_are_cleared_or_restored_before_first_use() -> None:
    world = world_of(snapshots=4)
    prompt = [3] * 9
    cold = world.submit(prompt, 2)
    plan = world.step()
    assert plan is not None
    assert [plan.requests[row] for row in plan.fresh_rows] == [cold]
    assert len(plan.clears) == 1 and not plan.restores
    world.drain()
    world.submit(prompt, 2)
    plan = world.step()
    assert plan is not None
    assert not plan.clears and [slot for _, slot in plan.restores] == plan.slots.tolist()


def test_timestamps_are_in_order() -> None:
    world = world_of()
    request = world.submit([1] * 20, 5)
    world.drain()
    stamps = [request.submitted_s, request.admitted_s, request.first_token_s, request.finished_s]
    assert None not in stamps
    assert stamps == sorted(stamps)  # type: ignore[type-var]
