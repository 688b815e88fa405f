"""A hit is where full-attention pages and a whole snapshot exist at one boundary; it changes no token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tests.qwen35.conftest import Group6
from tests.support.positions import EveryPosition, drawn, serve

import trivet

ATOL = 2e-3
ONE = trivet.Sampling(max_new_tokens=1)


def load(
    group6: Group6,
    *,
    page_size: int = 16,
    stride: int | None = None,
    max_step_tokens: int = 64,
    max_requests: int = 4,
    snapshot_bytes: int | None = None,
    kv_pages: int | None = None,
) -> trivet.Runtime:
    return trivet.Runtime.load(
        group6.directory,
        device="cpu",
        limits=trivet.Limits(max_requests, max_step_tokens, max_context=420, page_size=page_size),
        snapshot_stride=stride,
        snapshot_bytes=snapshot_bytes,
        kv_pages=kv_pages,
        autostart=False,
    )


def cached(runtime: trivet.Runtime, prompt: Sequence[int], sampling: trivet.Sampling = ONE) -> int:
    return runtime.generate([list(prompt)], sampling)[0].cached_tokens


STRIDES = [(page, stride) for page in (1, 3, 16) for stride in (page, 2 * page, 64 // page * page)]


@pytest.mark.parametrize("max_step_tokens", [1, 5, 64, 500])
@pytest.mark.parametrize(("page_size", "stride"), STRIDES)
def test_an_immediate_rerun_hits_the_last_multiple_of_the_stride_before_the_last_token(
    page_size: int, stride: int, max_step_tokens: int, group6: Group6
) -> None:
    rng = np.random.default_rng([page_size, stride, max_step_tokens])
    with load(group6, page_size=page_size, stride=stride, max_step_tokens=max_step_tokens) as runtime:
        assert runtime.stats()["prefix_grain_tokens"] == stride
        lengths = {1, 2, stride, stride + 1, 2 * stride, 2 * stride + 1, int(rng.integers(2, 170))}
        if max_step_tokens == 1:
            lengths = {stride, stride + 1, int(rng.integers(2, 100))}
        for first, tokens in enumerate(sorted(lengths)):
            prompt = [first, *drawn(rng, tokens - 1)]
            assert cached(runtime, prompt) == 0
            for sampling in (ONE, trivet.Sampling(max_new_tokens=int(rng.integers(2, 12)))):
                before = runtime.stats()["prefix_hit_tokens"]
                assert cached(runtime, prompt, sampling) == (tokens - 1) // stride * stride
                assert runtime.stats()["prefix_hit_tokens"] - before == (tokens - 1) // stride * stride


@pytest.mark.parametrize("stride", [None, 32, 64])
def test_the_grain_is_the_page_on_a_cpu_unless_a_stride_is_given(stride: int | None, group6: Group6) -> None:
    with load(group6, stride=stride) as runtime:
        assert runtime.stats()["prefix_grain_tokens"] == (stride or 16)


@pytest.mark.parametrize("stride", [1, 8, 24, 17])
def test_a_stride_that_is_no_multiple_of_the_page_is_refused(stride: int, group6: Group6) -> None:
    with pytest.raises(trivet.ConfigError, match=f"snapshot_stride is {stride}.*multiple of page_size 16"):
        load(group6, stride=stride)


@pytest.mark.parametrize("stride", [16, 32, 64])
@pytest.mark.parametrize("max_step_tokens", [5, 500])
def test_a_shared_system_prompt_is_found_from_its_second_use_on(
    stride: int, max_step_tokens: int, group6: Group6
) -> None:
    """The first use leaves pages. The second finds them without a snapshot, and leaves one where it branches off."""
    rng = np.random.default_rng([stride, max_step_tokens])
    system = drawn(rng, 150)
    with load(group6, stride=stride, max_step_tokens=max_step_tokens) as runtime:
        ears = EveryPosition(runtime)
        hits = []
        for user in range(4):
            prompt = [*system, user, *drawn(rng, 70)]
            (request,) = serve(runtime, [prompt], trivet.Sampling(max_new_tokens=3))
            assert ears.worst_gap(group6.model, prompt, request) <= ATOL
            hits.append(request.completion.cached_tokens)
        assert hits == [0, 0] + [150 // stride * stride] * 2


def test_a_hit_is_never_where_pages_lie_without_a_snapshot(group6: Group6) -> None:
    rng = np.random.default_rng(1)
    prompt = drawn(rng, 100)
    with load(group6, stride=16) as runtime:
        ears = EveryPosition(runtime)
        assert cached(runtime, prompt) == 0
        # Pages lie at every 16 of 96 tokens; a snapshot lies at 96, then also where each prompt branches off.
        for shared, hit in ((17, 0), (50, 16), (90, 48), (90, 80)):
            branch = [*prompt[:shared], *drawn(rng, 5)]
            (request,) = serve(runtime, [branch], ONE)
            assert request.completion.cached_tokens == hit
            assert ears.worst_gap(group6.model, branch, request) <= ATOL


@pytest.mark.parametrize("max_step_tokens", [5, 500])
@pytest.mark.parametrize(("page_size", "stride"), [(1, 1), (3, 6), (16, 16), (16, 64)])
def test_the_next_turn_of_a_chat_hits_the_answer_of_the_one_before(
    page_size: int, stride: int, max_step_tokens: int, group6: Group6
) -> None:
    rng = np.random.default_rng([page_size, stride, max_step_tokens])
    with load(group6, page_size=page_size, stride=stride, max_step_tokens=max_step_tokens) as runtime:
        ears = EveryPosition(runtime)
        turn = drawn(rng, 21)
        computed = 0  # by the turns before
        for _ in range(4):
            answer_tokens = int(rng.integers(1, 50))
            (request,) = serve(runtime, [turn], trivet.Sampling(max_new_tokens=answer_tokens))
            completion = request.completion
            assert completion.cached_tokens >= computed // stride * stride
            assert ears.worst_gap(group6.model, turn, request) <= ATOL
            computed = len(turn) + answer_tokens - 1
            turn = [*turn, *completion.token_ids, *drawn(rng, int(rng.integers(1, 30)))]


def test_a_turn_that_ends_by_a_stop_token_is_hit_like_one_that_ends_by_length(group6: Group6) -> None:
    rng = np.random.default_rng(2)
    prompt = drawn(rng, 30)
    with load(group6, page_size=1) as runtime:
        answer = runtime.generate([prompt], trivet.Sampling(max_new_tokens=20))[0].token_ids
        stop = answer[9]
        out = runtime.generate([prompt], trivet.Sampling(max_new_tokens=20, stop_token_ids=(stop,)))[0]
        assert out.finish_reason == "stop"
        assert cached(runtime, [*prompt, *out.token_ids, 1, 2, 3]) >= len(prompt) + len(out.token_ids) - 1


def test_a_hit_changes_no_token_at_any_temperature(group6: Group6) -> None:
    rng = np.random.default_rng(3)
    prompt = drawn(rng, 100)
    sampling = trivet.Sampling(max_new_tokens=20, temperature=1.0, seed=11)
    with load(group6) as runtime:
        cold, warm = (runtime.generate([prompt], sampling)[0] for _ in range(2))
        assert (cold.cached_tokens, warm.cached_tokens) == (0, 96)
        assert warm.token_ids == cold.token_ids


def test_the_same_prompt_many_times_at_once_is_served_and_found(group6: Group6) -> None:
    rng = np.random.default_rng(4)
    prompt = drawn(rng, 100)
    with load(group6, max_step_tokens=33) as runtime:
        ears = EveryPosition(runtime)
        for _ in range(2):
            for request in serve(runtime, [prompt] * 7, trivet.Sampling(max_new_tokens=6)):
                assert ears.worst_gap(group6.model, prompt, request) <= ATOL
        assert cached(runtime, prompt) == 96
        stats = runtime.stats()
        assert stats["pages_held"] == 0 and stats["snapshots_free"] > 0


def test_without_prefix_cache_nothing_is_cached_and_no_snapshot_is_reserved(group6: Group6) -> None:
    limits = trivet.Limits(2, 64, 128, 16)
    with trivet.Runtime.load(
        group6.directory, device="cpu", limits=limits, prefix_cache=False, autostart=False
    ) as runtime:
        prompt = drawn(np.random.default_rng(5), 60)
        assert [cached(runtime, prompt) for _ in range(2)] == [0, 0]
        assert runtime.stats()["pages_cached"] == runtime.stats()["snapshots_total"] == 0
        assert runtime.memory.line("snapshots").bytes == 0


@pytest.mark.parametrize("pages", [9, 12, 20])
def test_pages_evicted_under_a_small_pool_take_their_snapshots_along(pages: int, group6: Group6) -> None:
    rng = np.random.default_rng(pages)
    system = drawn(rng, 48)
    prompts = [[*system[: int(rng.integers(0, 49))], user, *drawn(rng, 60)] for user in range(6)]
    with load(group6, kv_pages=pages, max_step_tokens=40) as runtime:
        ears = EveryPosition(runtime)
        for _ in range(3):
            requests = serve(runtime, prompts, trivet.Sampling(max_new_tokens=8))
            for prompt, request in zip(prompts, requests, strict=True):
                assert ears.worst_gap(group6.model, prompt, request) <= ATOL
            stats = runtime.stats()
            assert stats["snapshots_total"] - stats["snapshots_free"] <= stats["pages_cached"]
