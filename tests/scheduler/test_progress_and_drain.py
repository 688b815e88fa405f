"""Nothing starves: running rows advance, and queues drain, within the bounds that the scheduler states."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scheduler.fake_engine import World, random_prompts, solo_run

from trivet.capacity import Limits
from trivet.scheduler import Request, drain_bound_steps, progress_bound_steps

WORLDS = st.fixed_dictionaries(
    {
        "requests": st.integers(1, 6),
        "step_tokens": st.sampled_from([1, 2, 3, 5, 40]),
        "page_size": st.sampled_from([1, 3, 16]),
        "snapshots": st.sampled_from([None, None, 0, 1, 3]),
        "chunked": st.booleans(),
        "mixed": st.booleans(),
        "cuts_inside": st.booleans(),
        "spare_pages": st.integers(0, 30),
    }
)


def world_of(drawn: dict[str, int | None], context: int = 40) -> World:
    snapshots = drawn["snapshots"]
    limits = Limits(drawn["requests"], drawn["step_tokens"], context, drawn["page_size"])
    return World.of(
        limits,
        limits.pages_per_request + drawn["spare_pages"],
        snapshots=snapshots,
        chunked=bool(drawn["chunked"]) or snapshots is not None,
        mixed=bool(drawn["mixed"]),
        cuts_inside=bool(drawn["cuts_inside"]),
    )


def queue(world: World, rng: random.Random, count: int) -> list[Request]:
    whole = world.limits.max_context if world.scheduler.gate.chunked_prefill else world.limits.max_step_tokens
    requests = []
    for prompt in random_prompts(rng, count, 30):
        kind = rng.choice(["generate", "generate", "score"])
        requests.append(world.submit(prompt[:whole], rng.randint(1, 10), kind))
    return requests


@settings(max_examples=150, deadline=None)
@given(drawn=WORLDS, rng=st.randoms(use_true_random=False))
def test_every_running_row_advances_within_the_stated_bound(drawn, rng) -> None:  # type: ignore[no-untyped-def]
    world = world_of(drawn)
    scheduler = world.scheduler
    chunked = scheduler.gate.chunked_prefill
    bound = progress_bound_steps(world.limits, chunked_prefill=chunked, mixed_steps=world.mixed)
    waits: dict[Request, int] = {}
    arrivals = 6
    while scheduler.has_work or arrivals:
        if arrivals and rng.random() < 0.5:
            queue(world, rng, rng.randint(1, 4))
            arrivals -= 1
        plan = world.launch()
        if plan is None:
            continue
        for request in scheduler.running:
            waits[request] = 0 if request in plan.requests else waits.get(request, 0) + 1
            assert waits[request] < bound, f"{request!r} waits for its {waits[request]}th step"
        world.land()


@settings(max_examples=100, deadline=None)
@given(drawn=WORLDS, rng=st.randoms(use_true_random=False))
def test_decode_rows_run_in_every_step_that_has_more_tokens_than_rows(drawn, rng) -> None:  # type: ignore[no-untyped-def]
    world = world_of(drawn | {"chunked": True, "mixed": True})
    queue(world, rng, 10)
    while world.scheduler.has_work:
        plan = world.launch()
        assert plan is not None
        if len(world.scheduler.running) <= world.limits.max_step_tokens:
            assert set(plan.requests) == set(world.scheduler.running)
        world.land()


@settings(max_examples=100, deadline=None)
@given(drawn=WORLDS, rng=st.randoms(use_true_random=False))
def test_at_most_one_row_is_partly_prefilled_while_steps_are_wide(drawn, rng) -> None:  # type: ignore[no-untyped-def]
    wide = {"chunked": True, "snapshots": None, "step_tokens": max(drawn["step_tokens"], drawn["requests"])}
    world = world_of(drawn | wide)
    queue(world, rng, 10)
    while world.scheduler.has_work:
        world.step()
        partly = [r for r in world.scheduler.running if r.cached_tokens < r.computed_tokens < r.prompt_tokens]
        assert len(partly) <= 1


@settings(max_examples=150, deadline=None)
@given(drawn=WORLDS, rng=st.randoms(use_true_random=False))
def test_any_queue_drains_within_the_stated_bound(drawn, rng) -> None:  # type: ignore[no-untyped-def]
    world = world_of(drawn)
    requests = queue(world, rng, rng.randint(1, 12))
    lengths = [(request.prompt_tokens, request.max_new_tokens) for request in requests]
    pauses = drawn["snapshots"] is not None and not drawn["cuts_inside"]
    bound = drain_bound_steps(lengths, world.limits.max_step_tokens, snapshots=pauses)
    assert world.drain() <= bound
    assert all(request.finish_reason == "length" for request in requests)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.integers(1, 5),
    room=st.integers(0, 9),
    grid_tokens=st.sampled_from([2, 4, 8]),
    snapshots=st.sampled_from([0, 1, 3]),
    cuts_inside=st.booleans(),
    mixed=st.booleans(),
    spare_pages=st.integers(0, 30),
    rng=st.randoms(use_true_random=False),
)
def test_on_a_grid_the_oldest_prompt_advances_in_every_step_and_any_queue_drains_within_the_bound(  # type: ignore[no-untyped-def]
    requests, room, grid_tokens, snapshots, cuts_inside, mixed, spare_pages, rng
) -> None:
    limits = Limits(requests, requests - 1 + grid_tokens + room, 40, grid_tokens)
    world = World.of(
        limits,
        limits.pages_per_request + spare_pages,
        snapshots=snapshots,
        cuts_inside=cuts_inside,
        mixed=mixed,
        grid_tokens=grid_tokens,
    )
    queued = queue(world, rng, rng.randint(1, 12))
    lengths = [(request.prompt_tokens, request.max_new_tokens) for request in queued]
    pauses = not cuts_inside
    bound = drain_bound_steps(lengths, limits.max_step_tokens, snapshots=pauses, grid_tokens=grid_tokens)
    within = progress_bound_steps(limits, mixed_steps=mixed)
    waits: dict[Request, int] = {}
    steps = 0
    while world.scheduler.has_work:
        plan = world.launch()
        assert plan is not None
        prefilling = [r for r in world.scheduler.running if r.computed_tokens < r.prompt_tokens]
        decoding = [r for r in world.scheduler.running if r.computed_tokens >= r.prompt_tokens]
        for request in (*prefilling[:1], *decoding):
            waits[request] = 0 if request in plan.requests else waits.get(request, 0) + 1
            assert waits[request] < within, f"{request!r} waits for its {waits[request]}th step"
        world.land()
        steps += 1
    assert steps <= bound
    for request in queued:
        prompt = request.tokens[: request.prompt_tokens]
        new_tokens = 0 if request.kind == "score" else request.max_new_tokens
        assert request.new_token_ids == solo_run(prompt, new_tokens, grid_tokens=grid_tokens)


def test_the_drain_bound_is_met_exactly_by_a_lone_request() -> None:
    world = World.of(Limits(1, 4, 64, 16), 4)
    world.submit(range(10), 6)
    assert world.drain() == 2 + 6
    assert drain_bound_steps([(10, 6)], 4) == (10 + 5) // 4 + 6


@pytest.mark.parametrize("step_tokens", [1, 2, 3, 7, 64])
def test_requests_are_admitted_in_order_of_arrival(step_tokens: int) -> None:
    rng = random.Random(step_tokens)
    world = World.of(Limits(3, step_tokens, 64, 4), 18)
    requests = queue(world, rng, 15)
    world.drain()
    admitted = sorted(requests, key=lambda request: (request.admitted_s, request.id))
    assert admitted == requests


def test_a_small_request_does_not_overtake_one_that_waits_for_pages() -> None:
    world = World.of(Limits(4, 64, 64, 4), 16, prefix=False)
    world.submit([1] * 40, 4)
    world.step()
    large = world.submit([2] * 40, 4)
    small = world.submit([3], 1)
    while large.admitted_s is None:
        assert small.admitted_s is None
        world.step()
    world.drain()
    assert large.finish_reason == small.finish_reason == "length"


def test_prefill_and_decode_take_turns_where_they_cannot_share_a_step() -> None:
    world = World.of(Limits(4, 8, 64, 4), 64, mixed=False)
    world.submit([1], 20)
    world.step()
    world.submit([2] * 40, 2)
    paths = [plan.path for plan in (world.step() for _ in range(8)) if plan is not None]
    assert paths in (["prefill", "decode"] * 4, ["decode", "prefill"] * 4)


def test_a_long_prompt_is_chunked_beside_decode_rows() -> None:
    world = World.of(Limits(4, 8, 64, 4), 64)
    decoding = world.submit([1], 20)
    world.step()
    world.submit([2] * 40, 2)
    plan = world.step()
    assert plan is not None
    assert [(row.kind, row.tokens) for row in plan.rows] == [("decode", 1), ("prefill", 7)]
    assert decoding.new_tokens == 2


def test_a_whole_prompt_waits_at_most_one_step_for_decode_rows() -> None:
    world = World.of(Limits(4, 8, 64, 4), 64, chunked=False)
    world.submit([1], 20)
    world.step()
    whole = world.submit([2] * 8, 2)
    world.step()
    world.step()
    assert whole.first_token_s is not None
