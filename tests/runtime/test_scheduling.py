"""The scheduling promises, seen through the runtime: one gate on every route, order, progress, bounded draining."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.runtimes import assert_at_rest

import trivet
from trivet.scheduler.bounds import progress_bound_steps

LIMITS = trivet.Limits(max_requests=3, max_step_tokens=10, max_context=64, page_size=4)
POOL_PAGES = 10  # 40 tokens

ROUTES: dict[str, Callable[[trivet.Runtime, list[int], int], Any]] = {
    "generate": lambda r, p, n: r.generate([p], trivet.Sampling(max_new_tokens=n)),
    "stream": lambda r, p, n: list(r.stream(p, trivet.Sampling(max_new_tokens=n))),
    "submit": lambda r, p, n: r.submit(p, trivet.Sampling(max_new_tokens=n)),
    "score": lambda r, p, n: r.score(p + [1] * n),
}


@pytest.fixture
def runtime(family_checkpoint: Path) -> trivet.Runtime:
    with trivet.Runtime.load(
        family_checkpoint, device="cpu", limits=LIMITS, kv_pages=POOL_PAGES, autostart=False
    ) as runtime:
        yield runtime


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_passes_the_one_admission_gate(
    route: str, runtime: trivet.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(trivet.RequestRejected, match=r"max_context|lifetime|pool"):
        ROUTES[route](runtime, [1] * 40, 20)
    with pytest.raises(trivet.RequestRejected, match="pool"):
        ROUTES[route](runtime, [1] * 39, 3)
    ROUTES[route](runtime, [1] * 38, 2)
    runtime.run_until_idle()
    gate = runtime._engine.scheduler.gate

    def closed(*args: Any) -> int:
        raise trivet.RequestRejected("the gate is closed")

    monkeypatch.setattr(gate, "check", closed)
    with pytest.raises(trivet.RequestRejected, match="gate is closed"):
        ROUTES[route](runtime, [1], 1)
    assert_at_rest(runtime)


def test_what_fits_later_waits_and_is_served_in_order(runtime: trivet.Runtime) -> None:
    handles = [runtime.submit([n] * 20, trivet.Sampling(max_new_tokens=10)) for n in range(5)]
    order: list[int] = []
    while not all(handle.done for handle in handles):
        runtime.step()
        order += [n for n, handle in enumerate(handles) if handle.done and n not in order]
        assert runtime.stats()["pages_held"] <= POOL_PAGES
    assert order == sorted(order)
    assert_at_rest(runtime)


def test_every_decode_row_advances_in_each_step_beside_a_long_prompt(runtime: trivet.Runtime) -> None:
    short = [runtime.submit([n], trivet.Sampling(max_new_tokens=8)) for n in (1, 2)]
    runtime.step()
    long = runtime.submit([5] * 20, trivet.Sampling(max_new_tokens=2))
    while not long.completion.token_ids:
        before = [len(handle.completion.token_ids) for handle in short]
        report = runtime.step()
        assert [len(handle.completion.token_ids) for handle in short] == [n + 1 for n in before]
        assert report.path in ("mixed", "decode")
        assert report.prefill_tokens + report.decode_tokens <= LIMITS.max_step_tokens
    runtime.run_until_idle()


@pytest.mark.parametrize("max_step_tokens", [1, 2, 3])
def test_every_running_row_advances_within_the_stated_bound(max_step_tokens: int, family_checkpoint: Path) -> None:
    limits = trivet.Limits(max_requests=4, max_step_tokens=max_step_tokens, max_context=64, page_size=4)
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=limits, autostart=False) as runtime:
        for n in range(4):
            runtime.submit([n] * (3 + 2 * n), trivet.Sampling(max_new_tokens=6))
        scheduler = runtime._engine.scheduler
        seen: dict[int, tuple[int, int]] = {}
        for step in range(200):
            if not scheduler.has_work:
                break
            runtime.step()
            for request in scheduler.running:
                computed, since = seen.get(request.id, (-1, step))
                if request.computed_tokens != computed:
                    seen[request.id] = (request.computed_tokens, step)
                else:
                    assert step - since < progress_bound_steps(limits)
        assert not scheduler.has_work
        assert_at_rest(runtime)


def test_none_means_as_many_new_tokens_as_fit(family_checkpoint: Path) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        out = runtime.generate([[1] * 50], trivet.Sampling(max_new_tokens=None))[0]
        assert len(out.token_ids) == LIMITS.max_context - 50


def test_a_waiting_request_does_not_evict_its_own_matched_pages(runtime: trivet.Runtime) -> None:
    prompt = [3] * 17
    runtime.generate([prompt], trivet.Sampling(max_new_tokens=1))
    blocker = runtime.submit([9] * 12, trivet.Sampling(max_new_tokens=10))
    waiting = runtime.submit(prompt, trivet.Sampling(max_new_tokens=6))
    runtime.run_until_idle()
    assert blocker.completion.finish_reason == "length"
    assert waiting.completion.cached_tokens == 16


def test_log_probabilities_of_a_prompt_do_not_depend_on_chunks_neighbours_or_cache(family_checkpoint: Path) -> None:
    tokens = [int(n * n % 97) for n in range(40)]
    results = []
    for budget in (1, 7, 64):
        limits = trivet.Limits(3, budget, 64, 4)
        with trivet.Runtime.load(family_checkpoint, device="cpu", limits=limits, autostart=False) as runtime:
            results.append(runtime.score(tokens))
            runtime.generate([tokens], trivet.Sampling(max_new_tokens=2))
            runtime.submit([1] * 9, trivet.Sampling(max_new_tokens=30))
            results.append(runtime.score(tokens))
    for result in results[1:]:
        assert [entry.token_id for entry in result] == tokens[1:]
        for entry, first in zip(result, results[0], strict=True):
            assert entry.logprob == pytest.approx(first.logprob, abs=1e-4)


def test_a_seeded_request_draws_the_same_tokens_alone_beside_others_and_after_a_restart(
    family_checkpoint: Path,
) -> None:
    sampling = trivet.Sampling(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=42)
    others = trivet.Sampling(max_new_tokens=12, temperature=1.3, seed=7)
    seen = set()
    for _ in range(2):
        with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
            seen.add(runtime.generate([[1, 2, 3]], sampling)[0].token_ids)
            outs = runtime.generate([[9], [8, 8], [1, 2, 3]], [others, others, sampling])
            seen.add(outs[2].token_ids)
    assert len(seen) == 1
