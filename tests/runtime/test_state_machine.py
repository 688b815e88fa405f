"""Any order of submitting, stepping, cancelling, failing and reusing leaves the accounts right and the tokens alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests.support.oracle import TIE_NATS

import trivet

PAGE_SIZE = 4
LIMITS = trivet.Limits(max_requests=4, max_step_tokens=11, max_context=48, page_size=PAGE_SIZE)
POOL_PAGES = 20  # less than two full contexts: requests wait, and cached pages are evicted
PREFIXES = [[7] * 9, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], []]


Key = tuple[tuple[int, ...], int, int | None]


class SoloTokens(dict[Key, tuple[int, ...]]):
    """Tokens of each request run alone, in a runtime of its own without a cache; made when first asked for."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.runtime = trivet.Runtime.load(directory, device="cpu", limits=LIMITS, prefix_cache=False, autostart=False)

    def __missing__(self, key: Key) -> tuple[int, ...]:
        prompt, new, seed = key
        sampling = trivet.Sampling(max_new_tokens=new, temperature=0.0 if seed is None else 0.7, seed=seed)
        self[key] = self.runtime.generate([list(prompt)], sampling)[0].token_ids
        return self[key]

    def assert_equal_up_to_a_tie(self, key: Key, tokens: tuple[int, ...]) -> None:
        """`tokens` begin the solo run's, or leave it where two greedy choices are nearer than a tie."""
        prompt, _, seed = key
        for place, (token, expected) in enumerate(zip(tokens, self[key], strict=False)):
            if token != expected:
                before = [*prompt, *tokens[:place]]
                gap = [self.runtime.score([*before, choice])[-1].logprob for choice in (token, expected)]
                assert seed is None and abs(gap[0] - gap[1]) < TIE_NATS, f"token {place} of {key}: {token}"
                return


class RuntimeMachine(RuleBasedStateMachine):
    """Drives one runtime of a family; `runtime` and `solo` are set by the test."""

    runtime: ClassVar[trivet.Runtime]
    solo: ClassVar[SoloTokens]

    handles = Bundle("handles")

    @initialize()
    def start(self) -> None:
        self.open: list[tuple[trivet.Request, tuple[Any, ...]]] = []
        self.runtime.run_until_idle()

    @rule(
        target=handles,
        prefix=st.sampled_from(PREFIXES),
        suffix=st.lists(st.integers(0, 96), min_size=1, max_size=8),
        new=st.integers(1, 7),
        seed=st.sampled_from([None, 1]),
    )
    def submit(self, prefix: list[int], suffix: list[int], new: int, seed: int | None) -> trivet.Request:
        sampling = trivet.Sampling(max_new_tokens=new, temperature=0.0 if seed is None else 0.7, seed=seed)
        prompt = prefix + suffix
        request = self.runtime.submit(prompt, sampling)
        self.open.append((request, (tuple(prompt), new, seed)))
        return request

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.runtime.step()

    @rule(steps=st.integers(1, 4))
    def step_with_one_in_flight(self, steps: int) -> None:
        for _ in range(steps):
            self.runtime._step(overlap=True)

    @rule(request=consumes(handles))
    def cancel(self, request: trivet.Request) -> None:
        request.cancel()

    @rule(overlap=st.booleans())
    def fail(self, overlap: bool) -> None:
        engine = self.runtime._engine
        model = engine.model

        class Broken:
            def __call__(self, *args: Any) -> Any:
                raise MemoryError("injected")

        engine.model = Broken()  # type: ignore[assignment]
        try:
            self.runtime._step(overlap=overlap)
        finally:
            engine.model = model

    @invariant()
    def accounts_add_up(self) -> None:
        if not hasattr(self, "open"):
            return
        stats = self.runtime.stats()
        scheduler = self.runtime._engine.scheduler
        assert stats["pages_free"] + stats["pages_cached"] + stats["pages_held"] == stats["pages_total"] == POOL_PAGES
        running = scheduler.running
        assert stats["slots_free"] + len(running) == stats["slots_total"]
        assert len({request.slot for request in running}) == len(running)
        assert stats["requests_running"] <= len(running)  # others have ended with a row in flight
        assert stats["requests_submitted"] == (
            stats["requests_finished"] + stats["requests_running"] + stats["requests_waiting"]
        )
        listed = Counter(page for request in running for page in request.pages)
        for request in running:
            for place, page in enumerate(request.pages):
                if listed[page] > 1:
                    # shared by several: published, full, and of the same tokens in each
                    last = (place + 1) * PAGE_SIZE
                    sharers = [other for other in running if page in other.pages]
                    assert len({tuple(other.tokens[:last]) for other in sharers}) == 1
                    assert all(other.computed_tokens >= last for other in sharers)

    @invariant()
    def finished_tokens_equal_the_solo_run(self) -> None:
        if not hasattr(self, "open"):
            return
        for request, key in [entry for entry in self.open if entry[0].done]:
            self.open.remove((request, key))
            completion = request.completion
            expected = self.solo[key]
            if completion.finish_reason == "length":
                assert len(completion.token_ids) == len(expected)
            assert completion.finish_reason != "stop"
            self.solo.assert_equal_up_to_a_tie(key, completion.token_ids)

    def teardown(self) -> None:
        if hasattr(self, "open"):
            self.runtime.run_until_idle()
            self.finished_tokens_equal_the_solo_run()
            stats = self.runtime.stats()
            assert stats["pages_held"] == 0 and stats["pages_reserved"] == 0
            assert stats["slots_free"] == stats["slots_total"]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_no_order_of_events_breaks_the_accounts_or_changes_a_token(prefix_cache: bool, family_checkpoint: Path) -> None:
    with trivet.Runtime.load(
        family_checkpoint,
        device="cpu",
        limits=LIMITS,
        kv_pages=POOL_PAGES,
        prefix_cache=prefix_cache,
        autostart=False,
    ) as runtime:
        machine = type("Machine", (RuntimeMachine,), {"runtime": runtime, "solo": SoloTokens(family_checkpoint)})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=40,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
