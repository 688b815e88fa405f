"""Nothing that a request leaves behind reaches another: free and padding pages, page tails, slots and snapshots hold
NaN in these tests, and every position of every request still says what transformers says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.qwen35.conftest import Group6
from tests.support.poison import NAN, poison
from tests.support.positions import EveryPosition, drawn

import trivet

ATOL = 2e-3
LIMITS = trivet.Limits(max_requests=3, max_step_tokens=17, max_context=160, page_size=3)


@pytest.fixture
def runtime(group6: Group6) -> Iterator[trivet.Runtime]:
    with trivet.Runtime.load(
        group6.directory, device="cpu", limits=LIMITS, snapshot_stride=6, autostart=False
    ) as runtime:
        yield runtime


def run_poisoned(runtime: trivet.Runtime, requests: Sequence[trivet.Request]) -> None:
    """Step until all are done, with NaN in all that is free before every step."""
    while not all(request.done for request in requests):
        assert poison(runtime)
        runtime.step()


def submit(runtime: trivet.Runtime, prompt: Sequence[int], new_tokens: int = 5) -> trivet.Request:
    return runtime.submit(list(prompt), trivet.Sampling(max_new_tokens=new_tokens))


def assert_everything_is_back(runtime: trivet.Runtime) -> None:
    stats = runtime.stats()
    assert stats["slots_free"] == stats["slots_total"]
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    assert stats["pages_reserved"] == stats["requests_running"] == 0


def test_requests_that_come_and_go_over_poisoned_slots_pages_and_snapshots(
    runtime: trivet.Runtime, group6: Group6
) -> None:
    """Eight requests through three slots, some over each other's snapshots, twice over."""
    rng = np.random.default_rng(1)
    base = drawn(rng, 120)
    prompts = [base[: int(n)] + drawn(rng, int(m)) for n, m in rng.integers(1, 60, (8, 2))]
    ears = EveryPosition(runtime)
    cached = 0
    for _ in ("cold", "warm"):
        requests = [submit(runtime, prompt, int(rng.integers(1, 12))) for prompt in prompts]
        run_poisoned(runtime, requests)
        for prompt, request in zip(prompts, requests, strict=True):
            assert ears.worst_gap(group6.model, prompt, request) <= ATOL
            cached += request.completion.cached_tokens
        assert_everything_is_back(runtime)
    assert cached > 100


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_request_cancelled_in_the_middle_of_its_prompt_leaves_no_trace(
    steps: int, runtime: trivet.Runtime, group6: Group6
) -> None:
    rng = np.random.default_rng(steps)
    prompt = drawn(rng, 100)
    cancelled = submit(runtime, prompt)
    beside, other = drawn(rng, 4), drawn(rng, 40)
    ears = EveryPosition(runtime)
    neighbour = submit(runtime, beside, 20)
    for _ in range(steps):
        poison(runtime)
        runtime.step()
    (row,) = [request for request in runtime._engine.scheduler.running if request.id == cancelled.id]
    assert 0 < row.computed_tokens < len(prompt)
    slot = row.slot
    cancelled.cancel()
    runtime.step()
    assert cancelled.completion.finish_reason == "cancelled"
    fills = [submit(runtime, other), submit(runtime, prompt)]
    poison(runtime)
    runtime.step()
    assert slot in [request.slot for request in runtime._engine.scheduler.running], "its slot was not lent again"
    run_poisoned(runtime, [neighbour, *fills])
    for ids, request in zip((beside, other, prompt), (neighbour, *fills), strict=True):
        assert ears.worst_gap(group6.model, ids, request) <= ATOL
    assert_everything_is_back(runtime)


def test_a_request_cancelled_while_decoding_leaves_no_trace(runtime: trivet.Runtime, group6: Group6) -> None:
    rng = np.random.default_rng(7)
    prompt = drawn(rng, 20)
    cancelled = submit(runtime, prompt, 50)
    while len(cancelled.completion.token_ids) < 9:
        runtime.step()
    answered = list(cancelled.completion.token_ids)
    cancelled.cancel()
    runtime.run_until_idle()
    assert_everything_is_back(runtime)
    ears = EveryPosition(runtime)
    turn = [*prompt, *answered, *drawn(rng, 6)]
    again = submit(runtime, turn)
    run_poisoned(runtime, [again])
    assert again.completion.cached_tokens >= (len(prompt) + len(answered) - 1) // 6 * 6
    assert ears.worst_gap(group6.model, turn, again) <= ATOL


def model_that(change: Callable[[torch.Tensor, int], torch.Tensor], model: Any) -> Any:
    """The model, with the hidden states of its n-th call changed by ``change(hidden, n)``."""

    class Changed:
        calls = 0

        def __call__(self, token_ids: torch.Tensor, step: Any) -> torch.Tensor:
            self.calls += 1
            step.outputs = None  # every token's
            return change(model(token_ids, step), self.calls)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return model.logits(hidden)  # type: ignore[no-any-return]

    return Changed()


@pytest.mark.parametrize("failing_step", [1, 2, 3])
def test_a_step_that_raises_after_the_states_were_written_leaves_no_trace(
    failing_step: int, runtime: trivet.Runtime, group6: Group6
) -> None:
    """States, pages and, at step 2, a snapshot were written by then: none of it is found afterwards."""
    rng = np.random.default_rng(failing_step)
    prompt, engine = drawn(rng, 40), runtime._engine
    sound = engine.model

    def fail(hidden: torch.Tensor, call: int) -> torch.Tensor:
        if call == failing_step:
            raise RuntimeError("the device stumbled")
        return hidden

    engine.model = model_that(fail, sound)
    failed = submit(runtime, prompt)
    runtime.run_until_idle()
    assert failed.completion.finish_reason == "error"
    assert_everything_is_back(runtime)
    engine.model = sound
    ears = EveryPosition(runtime)
    again, other = submit(runtime, prompt), submit(runtime, drawn(rng, 30))
    run_poisoned(runtime, [again, other])
    assert again.completion.cached_tokens <= (failing_step - 1) * LIMITS.max_step_tokens
    assert ears.worst_gap(group6.model, prompt, again) <= ATOL


def test_pages_and_snapshots_that_led_to_unusable_logits_are_never_found_again(
    runtime: trivet.Runtime, group6: Group6
) -> None:
    """The first page of a prompt goes bad in its first step; pages and a snapshot are published before it shows."""
    rng = np.random.default_rng(8)
    prompt, engine = drawn(rng, 40), runtime._engine
    sound = engine.model

    def spoil(hidden: torch.Tensor, call: int) -> torch.Tensor:
        if call == 1:
            (row,) = engine.scheduler.running
            engine.cache.layer(engine.blueprint.geometry.attention_layers[0])[1][row.pages[0], 0] = NAN
        return hidden

    engine.model = model_that(spoil, sound)
    spoilt = submit(runtime, prompt)
    while not spoilt.done:
        runtime.step()
        assert spoilt.done or not spoilt.completion.token_ids
    assert spoilt.completion.finish_reason == "error"
    assert_everything_is_back(runtime)
    engine.model = sound
    ears = EveryPosition(runtime)
    again = submit(runtime, prompt)
    run_poisoned(runtime, [again])
    assert again.completion.cached_tokens == 0
    assert ears.worst_gap(group6.model, prompt, again) <= ATOL


def test_a_row_with_unusable_logits_publishes_nothing_of_its_step(runtime: trivet.Runtime, group6: Group6) -> None:
    """A row whose logits are NaN ends alone: its page and its snapshot are not accepted, its neighbour's are."""
    rng = np.random.default_rng(3)
    prompt, beside, engine = drawn(rng, 6), drawn(rng, 6), runtime._engine
    sound = engine.model

    def spoil(hidden: torch.Tensor, call: int) -> torch.Tensor:
        if call == 1:
            hidden[5] = NAN  # the last token of the prompt, where a snapshot is saved
        return hidden

    engine.model = model_that(spoil, sound)
    spoilt, neighbour = submit(runtime, prompt), submit(runtime, beside)
    runtime.run_until_idle()
    assert spoilt.completion.finish_reason == "error"
    assert neighbour.completion.finish_reason == "length"
    assert_everything_is_back(runtime)
    engine.model = sound
    ears = EveryPosition(runtime)
    turns = [[*prompt, 1, 2], [*beside, 1, 2]]
    requests = [submit(runtime, turn) for turn in turns]
    run_poisoned(runtime, requests)
    assert [request.completion.cached_tokens for request in requests] == [0, 6]
    for turn, request in zip(turns, requests, strict=True):
        assert ears.worst_gap(group6.model, turn, request) <= ATOL


def test_a_step_changes_the_states_of_its_own_rows_and_no_other(runtime: trivet.Runtime, group6: Group6) -> None:
    """With three rows and two tokens a step, rows take turns: who waits keeps slot and pages bit for bit."""
    limits = trivet.Limits(max_requests=3, max_step_tokens=2, max_context=60, page_size=3)
    rng = np.random.default_rng(4)
    with trivet.Runtime.load(group6.directory, device="cpu", limits=limits, autostart=False) as turns:
        engine = turns._engine
        requests = [submit(turns, drawn(rng, 6), 12) for _ in range(3)]
        pools = [*engine.state._slot_views.values()]  # type: ignore[union-attr]
        waited = 0
        while not all(request.done for request in requests):
            poison(turns)
            before = [view.clone() for view in pools]
            starts = {row.slot: row.computed_tokens for row in engine.scheduler.running}
            turns.step()
            ends = {row.slot: row.computed_tokens for row in engine.scheduler.running}
            still = [slot for slot in starts if ends.get(slot) == starts[slot]]
            waited += len(still)
            for view, was in zip(pools, before, strict=True):
                assert torch.equal(view[still], was[still])
                assert view[-1].isnan().all(), "the padding slot was written by a step without padding rows"
        assert waited


def test_slots_come_from_a_free_list_and_not_from_the_id(runtime: trivet.Runtime) -> None:
    rng = np.random.default_rng(5)
    long = submit(runtime, drawn(rng, 3), 60)
    runtime.step()
    taken = {row.id: row.slot for row in runtime._engine.scheduler.running}
    for _ in range(8):  # ids move on past every residue while the long request keeps its slot
        short = submit(runtime, drawn(rng, 3), 2)
        while not short.done:
            runtime.step()
            slots = [row.slot for row in runtime._engine.scheduler.running]
            assert len(set(slots)) == len(slots)
    rows = {row.id: row.slot for row in runtime._engine.scheduler.running}
    assert rows[long.id] == taken[long.id]


def test_scores_and_generated_requests_share_slots_without_a_trace(runtime: trivet.Runtime, group6: Group6) -> None:
    rng = np.random.default_rng(6)
    prompt = drawn(rng, 50)
    clean = runtime.score(prompt, top=3)
    for _ in range(3):
        requests = [submit(runtime, drawn(rng, int(n))) for n in rng.integers(1, 50, 4)]
        for _ in range(3):
            runtime.step()
        poison(runtime)
        scores = runtime.score(prompt, top=3)
        assert all(abs(a.logprob - b.logprob) <= 1e-4 for a, b in zip(scores, clean, strict=True))
        run_poisoned(runtime, requests)
