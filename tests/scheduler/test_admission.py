"""The one gate: what could never be served is refused with the numbers, what fits later waits."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scheduler.fake_engine import World

from trivet.capacity import Limits
from trivet.checked import ceil_div
from trivet.errors import AccountingError, ConfigError, RequestRejected
from trivet.scheduler import AdmissionGate, Request

LIMITS = Limits(max_requests=2, max_step_tokens=8, max_context=32, page_size=4)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "kind", "numbers"),
    [
        (0, 1, "generate", ["empty"]),
        (0, None, "score", ["empty"]),
        (30, 3, "generate", ["30", "3", "33", "32"]),
        (32, None, "generate", ["32", "33"]),
        (33, None, "score", ["33", "32"]),
        (20, 6, "generate", ["20", "6", "25 tokens", "7 KV pages", "6 in all"]),
        (25, 1, "score", ["25", "7 KV pages", "6 in all"]),
        (5, 0, "generate", ["max_new_tokens is 0"]),
        (5, -3, "generate", ["max_new_tokens is -3"]),
    ],
)
def test_what_could_never_be_served_is_refused_with_the_numbers(
    prompt_tokens: int, max_new_tokens: int | None, kind: str, numbers: list[str]
) -> None:
    gate = AdmissionGate(LIMITS, 6)
    with pytest.raises(RequestRejected) as refusal:
        gate.check(prompt_tokens, max_new_tokens, kind)  # type: ignore[arg-type]
    assert all(number in str(refusal.value) for number in numbers), str(refusal.value)


def test_the_last_new_token_needs_no_page() -> None:
    gate = AdmissionGate(LIMITS, 6)
    assert gate.check(20, 5) == 5
    with pytest.raises(RequestRejected):
        gate.check(20, 6)


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.integers(1, 50),
    context=st.integers(1, 50),
    page_size=st.sampled_from([1, 3, 16]),
    pages=st.integers(0, 40),
)
def test_no_limit_on_new_tokens_means_as_many_as_fit(prompt: int, context: int, page_size: int, pages: int) -> None:
    gate = AdmissionGate(Limits(1, 8, context, page_size), pages)
    fitting = [
        new
        for new in range(1, context + 1)
        if prompt + new <= context and ceil_div(prompt + new - 1, page_size) <= pages
    ]
    if fitting:
        assert gate.check(prompt, None) == max(fitting)
    else:
        with pytest.raises(RequestRejected):
            gate.check(prompt, None)


def test_a_prompt_that_must_be_computed_whole_fits_one_step() -> None:
    gate = AdmissionGate(LIMITS, 8, chunked_prefill=False)
    assert gate.check(8, 1) == 1
    with pytest.raises(RequestRejected, match=r"9 tokens.*max_step_tokens.*8"):
        gate.check(9, 1)


def test_no_route_goes_round_the_gate() -> None:
    world = World.of(LIMITS, 6)
    with pytest.raises(RequestRejected):
        world.scheduler.submit(Request(0, [1] * 20, 6))
    with pytest.raises(RequestRejected):
        world.scheduler.submit(Request(0, [], 1))
    assert not world.scheduler.has_work
    assert world.scheduler.counters()["requests_submitted"] == 0


def test_reservations_cover_prefilling_and_decoding_requests() -> None:
    world = World.of(Limits(4, 4, 64, 4), 12, prefix=False)
    first = world.submit([1] * 8, 25)  # 8 pages in the end
    world.step()
    second = world.submit([2] * 17, 1)  # 5 pages: free now, but not beside the first one's lifetime
    world.step()
    assert world.pool.free_count >= 5
    assert first.admitted_s is not None and second.admitted_s is None
    world.drain(audited=True)
    assert second.finish_reason == "length"


def test_a_request_of_the_whole_pool_is_served_after_everything_else_was_cached() -> None:
    world = World.of(Limits(2, 64, 64, 4), 16)
    for seed in range(5):
        world.serve([seed] * 30, 3)
    assert world.serve([9] * 60, 4).finish_reason == "length"


def test_a_request_is_submitted_once() -> None:
    world = World.of(LIMITS, 6)
    request = world.submit([1, 2], 1)
    with pytest.raises(AccountingError):
        world.scheduler.submit(request)
    world.drain()
    with pytest.raises(AccountingError):
        world.scheduler.submit(request)


@pytest.mark.parametrize("prompt", [[[1, 2]], ["a"], [2**40], [None], np.zeros((2, 2), np.int32)])
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(prompt: object) -> None:
    with pytest.raises(RequestRejected, match="prompt"):
        Request(0, prompt, 1)  # type: ignore[arg-type]


def test_parts_that_do_not_fit_each_other_are_refused() -> None:
    from trivet.caches.pages import PagePool
    from trivet.caches.prefix import PrefixCache
    from trivet.caches.slots import SlotPool
    from trivet.scheduler import Scheduler

    pool, slots = PagePool(8), SlotPool(2)
    with pytest.raises(ConfigError, match="3 request slots"):
        Scheduler(LIMITS, pool, SlotPool(3))
    with pytest.raises(ConfigError, match="pages of 2 tokens"):
        Scheduler(LIMITS, pool, slots, prefix=PrefixCache(pool, 2))
    with pytest.raises(ConfigError, match="snapshots"):
        Scheduler(LIMITS, pool, slots, prefix=PrefixCache(pool, 4), recurrent=True)
    with pytest.raises(ConfigError, match="prefix_cache=False"):
        cache = PrefixCache(pool, 4, 8, SlotPool(2))
        Scheduler(LIMITS, pool, slots, prefix=cache, recurrent=True, chunked_prefill=False)
    with pytest.raises(ConfigError, match="snapshot_stride is 6"):
        PrefixCache(pool, 4, 6, SlotPool(2))


def test_scheduling_needs_no_torch() -> None:
    check = "import sys, trivet.scheduler, trivet.caches.prefix; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
