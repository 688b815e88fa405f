"""What the prefix cache gives: exact reruns, next turns, shared stems; and what it never gives."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scheduler.fake_engine import World, audit, random_prompts, solo_run

from trivet.capacity import Limits
from trivet.errors import ConfigError
from trivet.scheduler import Ending, Status


def prompt_of(seed: int, tokens: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(97) for i in range(tokens)]


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(1, 60),
    new_tokens=st.integers(1, 20),
    step_tokens=st.sampled_from([1, 2, 3, 7, 16, 64]),
    requests=st.integers(1, 3),
    page_size=st.sampled_from([1, 3, 16]),
    grain_pages=st.integers(1, 4),
    snapshots=st.sampled_from([None, 1, 2, 5]),
    cuts_inside=st.booleans(),
    earlier=st.integers(0, 4),
    rng=st.randoms(use_true_random=False),
)
def test_an_immediate_rerun_hits_up_to_the_last_grain(  # type: ignore[no-untyped-def]
    tokens, new_tokens, step_tokens, requests, page_size, grain_pages, snapshots, cuts_inside, earlier, rng
) -> None:
    limits = Limits(requests, step_tokens, 96, page_size)
    world = World.of(
        limits, limits.pages_per_request, snapshots=snapshots, grain_pages=grain_pages, cuts_inside=cuts_inside
    )
    assert world.prefix is not None
    grain = world.prefix.grain_tokens
    for stem in random_prompts(rng, earlier, 60):
        world.serve(stem, 3)
    prompt = random_prompts(rng, 1, tokens)[0]
    first = world.serve(prompt, new_tokens)
    before = world.scheduler.counters()["prefix_hit_tokens"]
    again = world.serve(prompt, new_tokens)
    assert again.cached_tokens == (len(prompt) - 1) // grain * grain
    assert world.scheduler.counters()["prefix_hit_tokens"] == before + again.cached_tokens
    assert again.new_token_ids == first.new_token_ids == solo_run(prompt, new_tokens)


@pytest.mark.parametrize("snapshots", [None, 4])
def test_a_prompt_is_counted_as_looked_up_once_however_long_it_waits_to_be_admitted(snapshots: int | None) -> None:
    world = World.of(Limits(2, 8, 64, 4), 16, snapshots=snapshots)
    prompt = prompt_of(1, 21)

    def counted() -> tuple[int, int]:
        counters = world.scheduler.counters()
        return counters["prefix_hit_tokens"], counters["prefix_prompt_tokens"]

    assert counted() == (0, 0)
    world.serve(prompt, 4)
    assert counted() == (0, 21)
    world.submit(prompt_of(2, 30), 20)  # 13 pages of the 16
    world.step()
    waiting = world.submit(prompt, 20)
    for _ in range(4):
        world.step()
    assert waiting.admitted_s is None and counted() == (0, 51)
    world.drain(audited=True)
    assert counted() == (waiting.cached_tokens, 72)
    world.serve(prompt, kind="score")
    assert counted() == (waiting.cached_tokens, 72), "a score is not looked up"


@pytest.mark.parametrize("step_tokens", [1, 5, 64])
@pytest.mark.parametrize("snapshots", [None, 2])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_next_turn_of_a_chat_hits_the_last_answer(page_size: int, snapshots: int | None, step_tokens: int) -> None:
    limits = Limits(2, step_tokens, 200, page_size)
    world = World.of(limits, 200, snapshots=snapshots, grain_pages=1)
    turn = world.serve(prompt_of(1, 40), 41)
    following = world.serve([*turn.tokens, *prompt_of(2, 5)], 1)
    assert following.cached_tokens == (40 + 41 - 1) // page_size * page_size


@pytest.mark.parametrize("step_tokens", [1, 5, 64])
def test_a_prompt_whose_end_is_a_boundary_is_hit_by_the_next_turn(step_tokens: int) -> None:
    world = World.of(Limits(2, step_tokens, 100, 4), 50, snapshots=3)
    turn = world.serve(prompt_of(1, 32), 1)
    following = world.serve([*turn.tokens, *prompt_of(2, 5)], 1)
    assert following.cached_tokens == 32


def test_where_layers_cut_inside_a_piece_a_prompt_takes_one_step_however_many_snapshots_it_leaves() -> None:
    world = World.of(Limits(2, 200, 200, 4), 100, snapshots=8, grain_pages=2, cuts_inside=True)
    stem = prompt_of(1, 50)
    world.serve(stem + prompt_of(2, 20), 2)
    before = len(world.steps)
    second = world.serve(stem + prompt_of(3, 20), 2)
    prefill, *_ = world.steps[before:]
    assert prefill.lengths == (second.prompt_tokens,)
    assert [cut.tokens for cut in prefill.cuts] == [48, 64]
    assert world.serve(stem + prompt_of(4, 20), 2).cached_tokens == 48
    assert world.serve(stem + prompt_of(3, 20), 2).cached_tokens == 64


@pytest.mark.parametrize("cuts_inside", [False, True])
def test_snapshots_of_new_tokens_take_none_that_a_running_prompt_can_be_hit_at(cuts_inside: bool) -> None:
    world = World.of(Limits(4, 64, 256, 4), 300, snapshots=5, cuts_inside=cuts_inside)
    prompts = [prompt_of(seed, 21) for seed in range(4)]
    for prompt in prompts:
        world.submit(prompt, 40)
    world.drain(audited=True)
    assert [world.serve(prompt, 1).cached_tokens for prompt in prompts] == [20] * 4


@pytest.mark.parametrize("cuts_inside", [False, True])
def test_with_one_snapshot_for_all_a_rerun_hits_the_last_boundary_and_not_the_branch_point(cuts_inside: bool) -> None:
    world = World.of(Limits(2, 200, 200, 8), 100, snapshots=1, cuts_inside=cuts_inside)
    stem = prompt_of(1, 50)
    world.serve(stem + prompt_of(2, 20), 1)
    prompt = stem + prompt_of(3, 20)
    world.serve(prompt, 1)
    assert world.serve(prompt, 1).cached_tokens == 64
    audit(world)


@pytest.mark.parametrize("cuts_inside", [False, True])
def test_on_a_grid_others_hit_what_prompts_left_and_nothing_of_new_tokens(cuts_inside: bool) -> None:
    world = World.of(Limits(2, 64, 200, 4), 100, snapshots=8, cuts_inside=cuts_inside, grid_tokens=4)
    turn = world.serve(prompt_of(1, 24), 41)
    following = [*turn.tokens, *prompt_of(2, 5)]
    second = world.serve(following, 3)
    assert second.cached_tokens == 24
    assert second.new_token_ids == solo_run(following, 3, grid_tokens=4)
    third = world.serve(following, 3)
    assert third.cached_tokens == (len(following) - 1) // 4 * 4
    assert third.new_token_ids == second.new_token_ids
    audit(world)


@pytest.mark.parametrize(
    ("step_tokens", "page_size", "said"),
    [
        (68, 64, "max_step_tokens is 68, expected at least 69"),
        (70, 16, "snapshot_stride is 16, expected a multiple of 64"),
    ],
)
def test_limits_that_a_grid_does_not_fit_are_refused(step_tokens: int, page_size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        World.of(Limits(6, step_tokens, 200, page_size), 100, snapshots=8, grid_tokens=64)


@pytest.mark.parametrize("step_tokens", [1, 5, 64])
def test_a_shared_stem_is_snapshot_by_the_second_request_and_hit_by_the_third(step_tokens: int) -> None:
    world = World.of(Limits(2, step_tokens, 200, 4), 100, snapshots=8, grain_pages=2)
    stem = prompt_of(1, 50)
    hits = [world.serve(stem + prompt_of(seed, 20), 2).cached_tokens for seed in (2, 3, 4)]
    assert hits == [0, 0, 48]


def test_only_the_newest_decode_time_snapshot_of_a_request_is_kept() -> None:
    world = World.of(Limits(1, 8, 200, 4), 50, snapshots=8)
    world.serve(prompt_of(1, 21), 60)
    assert world.snapshots is not None
    assert world.snapshots.total - world.snapshots.free_count == 2  # at the prompt's last boundary, and the newest


def test_a_request_gives_up_its_own_snapshot_before_it_takes_anothers() -> None:
    world = World.of(Limits(1, 8, 200, 4), 100, snapshots=3)
    other = prompt_of(2, 21)
    world.serve(other, 1)
    world.serve(prompt_of(1, 21), 60)
    assert world.serve(other, 1).cached_tokens == 20


def test_a_decode_time_snapshot_that_was_hit_is_not_given_up() -> None:
    world = World.of(Limits(2, 16, 200, 4), 100, snapshots=8)
    talker = world.submit(prompt_of(1, 5), 60)
    while talker.new_tokens < 20:
        world.step()
    prefix_now = list(talker.tokens[: talker.computed_tokens])
    follower = world.submit([*prefix_now, 96], 1)
    while not follower.done:
        world.step()
    assert follower.cached_tokens == len(prefix_now) // 4 * 4
    world.drain()
    assert world.serve([*prefix_now, 95], 1).cached_tokens == follower.cached_tokens


def test_concurrent_requests_share_pages_as_soon_as_these_are_computed() -> None:
    world = World.of(Limits(2, 8, 64, 4), 40)
    stem = prompt_of(1, 16)
    world.submit([*stem, 1], 30)
    for _ in range(3):
        world.step()
    second = world.submit([*stem, 2], 2)
    world.drain()
    assert second.cached_tokens == 16


def test_prompts_that_share_pages_may_list_more_pages_than_the_pool_has() -> None:
    world = World.of(Limits(8, 64, 80, 4), 30)
    stem = prompt_of(1, 64)
    world.serve(stem, 1)
    requests = [world.submit([*stem, last], 8) for last in range(7)]
    longest = 0
    while world.scheduler.has_work:
        plan = world.launch()
        assert plan is not None
        longest = max(longest, len(plan.page_indices))
        world.land()
        audit(world)
    assert longest > world.pool.total
    for request in requests:
        assert request.new_token_ids == solo_run(request.tokens[: request.prompt_tokens], 8)


def test_the_same_prompt_computed_twice_at_once_leaves_one_copy() -> None:
    world = World.of(Limits(4, 64, 64, 4), 40)
    prompt = prompt_of(1, 17)
    for _ in range(3):
        world.submit(prompt, 4)
    world.drain(audited=True)
    assert world.scheduler.counters()["pages_cached"] == (17 + 4 - 1) // 4


def test_publishing_what_is_cached_already_takes_nothing_from_a_reservation() -> None:
    """Two requests compute the same prompt; when the first has ended, only eviction can feed the others."""
    world = World.of(Limits(3, 8, 64, 1), 40, prefix=True)
    prompt = prompt_of(1, 12)
    world.submit(prompt, 1)
    world.submit(prompt, 2)
    world.submit(prompt_of(2, 4), 12)
    world.drain(audited=True)
    assert all(request.finish_reason == "length" for request in world.requests)


def test_a_waiting_request_does_not_evict_the_pages_that_it_matched() -> None:
    world = World.of(Limits(2, 64, 64, 4), 14)
    stem = prompt_of(1, 20)
    world.serve(stem, 1)
    world.submit(prompt_of(2, 30), 4)  # 9 pages; what is cached of the stem fits beside them
    world.step()
    waiting = world.submit([*stem, 1], 8)  # 5 cached pages and 2 new ones
    world.step()
    assert waiting.admitted_s is None
    world.drain(audited=True)
    assert waiting.cached_tokens == 20


def test_a_waiting_request_is_let_in_by_pages_that_it_can_share() -> None:
    world = World.of(Limits(2, 1, 64, 4), 12)
    prompt = prompt_of(1, 29)
    world.submit(prompt, 4)  # 8 pages
    sharing = world.submit(prompt, 4)  # 8 pages too, of which at least 4 must be shared
    while sharing.admitted_s is None:
        world.step()
        audit(world)
        assert not world.requests[0].done
    world.drain(audited=True)
    assert sharing.cached_tokens >= 16


def test_a_request_cancelled_before_its_first_step_lets_go_of_its_snapshot() -> None:
    world = World.of(Limits(2, 1, 64, 4), 40, snapshots=1)
    prompt = prompt_of(1, 9)
    world.serve(prompt, 1)
    world.submit([1] * 8, 8)
    hitting = world.submit(prompt, 1)
    world.step()
    assert hitting.cached_tokens == 8 and not hitting.scheduled_tokens > 8
    world.scheduler.cancel(hitting)
    audit(world)


@pytest.mark.parametrize("snapshots", [None, 4])
def test_score_neither_hits_nor_publishes(snapshots: int | None) -> None:
    world = World.of(Limits(2, 8, 64, 4), 40, snapshots=snapshots)
    prompt = prompt_of(1, 21)
    scored = world.serve(prompt, kind="score")
    assert scored.finish_reason == "length"
    assert world.scheduler.counters()["pages_cached"] == 0
    world.serve(prompt)
    assert world.serve(prompt, kind="score").cached_tokens == 0


def test_without_room_for_a_snapshot_nothing_is_hit_or_published() -> None:
    world = World.of(Limits(2, 8, 64, 4), 40, snapshots=0)
    prompt = prompt_of(1, 21)
    world.serve(prompt, 10)
    assert world.serve(prompt, 10).cached_tokens == 0
    assert world.scheduler.counters()["pages_free"] == 40


@pytest.mark.parametrize("snapshots", [None, 4])
def test_a_failed_step_publishes_nothing(snapshots: int | None) -> None:
    world = World.of(Limits(2, 64, 64, 4), 40, snapshots=snapshots)
    prompt = prompt_of(1, 21)
    failed = world.submit(prompt, 4)
    world.step(error=RuntimeError("the step failed"))
    assert failed.finish_reason == "error"
    assert world.scheduler.counters()["pages_free"] == 40
    assert world.serve(prompt, 4).cached_tokens == 0


@pytest.mark.parametrize("snapshots", [None, 4])
@pytest.mark.parametrize("step_tokens", [4, 7, 64])
@pytest.mark.parametrize("tokens", [20, 21])
def test_a_prefix_that_led_to_an_unusable_row_is_not_offered_again(
    tokens: int, step_tokens: int, snapshots: int | None
) -> None:
    """Prefill pieces are published before any logits are looked at, so they are withdrawn when these are bad."""
    world = World.of(Limits(1, step_tokens, 64, 4), 40, snapshots=snapshots)
    prompt = prompt_of(1, tokens)
    poisoned = world.submit(prompt, 4)
    world.poisoned.add(poisoned)
    while not poisoned.done:
        world.step(endings=lambda request: Ending("error", ValueError("NaN")))
    audit(world)
    assert world.serve(prompt, 4).cached_tokens == 0
    assert world.serve(prompt, 4).cached_tokens == (tokens - 1) // 4 * 4


def test_pages_of_a_running_request_survive_clear() -> None:
    world = World.of(Limits(2, 64, 64, 4), 40)
    prompt = prompt_of(1, 21)
    running = world.submit(prompt, 20)
    world.step()
    assert world.prefix is not None
    world.prefix.clear()
    world.drain(audited=True)
    assert running.new_token_ids == solo_run(prompt, 20)
    assert world.pool.free_count == 40
    assert world.serve(prompt, 1).cached_tokens == 0


def test_a_request_that_waits_for_pages_is_let_in_by_a_snapshot_of_what_it_shares() -> None:
    world = World.of(Limits(4, 64, 64, 4), 20, snapshots=2, cuts_inside=True)
    prompt = prompt_of(2, 33)
    world.serve(prompt, 1)
    for seed in (3, 4):  # these take the snapshots over, and its pages stay
        world.serve(prompt_of(seed, 5), 1)
    running, waiting = world.submit(prompt, 24), world.submit(prompt, 24)  # 14 pages each, 20 if they share 8
    world.step()
    assert (running.status, waiting.status) == (Status.RUNNING, Status.WAITING)
    world.step()
    world.step()
    assert waiting.status is Status.RUNNING and waiting.cached_tokens == 32
    world.drain()
    audit(world)
    assert running.new_token_ids == waiting.new_token_ids == solo_run(prompt, 24)
