"""Whatever comes in whatever order, pages and slots add up, nothing is aliased, and every answer is its solo run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.scheduler.fake_engine import VOCABULARY, World, audit, solo_run

from trivet.capacity import Limits
from trivet.errors import RequestRejected
from trivet.scheduler import Ending

STEM = [7, 7, 3, 7, 7, 3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18] * 3


class Serving(RuleBasedStateMachine):
    """Submit, step, cancel, stop, fail, evict, clear, with up to two steps in flight."""

    hybrid = False

    @initialize(
        requests=st.integers(1, 5),
        step_tokens=st.sampled_from([1, 2, 3, 7, 64]),
        page_size=st.sampled_from([1, 3, 16]),
        context=st.sampled_from([2, 9, 30, 72, 72]),
        spare_pages=st.integers(-2, 20),
        prefix=st.sampled_from([True, True, True, False]),
        snapshots=st.integers(0, 4),
        grain_pages=st.integers(1, 3),
        chunked=st.sampled_from([True, True, False]),
        mixed=st.sampled_from([True, True, False]),
        cuts_inside=st.booleans(),
    )
    def begin(
        self,
        requests: int,
        step_tokens: int,
        page_size: int,
        context: int,
        spare_pages: int,
        prefix: bool,
        snapshots: int,
        grain_pages: int,
        chunked: bool,
        mixed: bool,
        cuts_inside: bool,
    ) -> None:
        limits = Limits(requests, step_tokens, context, page_size)
        self.world = World.of(
            limits,
            max(1, limits.pages_per_request + spare_pages),
            prefix=prefix,
            snapshots=snapshots if self.hybrid else None,
            grain_pages=grain_pages,
            chunked=chunked or self.hybrid,
            mixed=mixed,
            cuts_inside=cuts_inside,
        )

    @rule(
        shared=st.integers(0, len(STEM)),
        own=st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
        max_new_tokens=st.one_of(st.integers(1, 40), st.none()),
        kind=st.sampled_from(["generate", "generate", "generate", "score"]),
    )
    def submit_anything(self, shared: int, own: list[int], max_new_tokens: int | None, kind: str) -> None:
        before = self.world.scheduler.counters()
        try:
            self.world.submit([*STEM[:shared], *own], max_new_tokens, kind)
        except RequestRejected:
            assert self.world.scheduler.counters() == before

    @rule(
        prompts=st.lists(
            st.tuples(st.integers(1, len(STEM)), st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=4
        )
    )
    def submit_what_fits(self, prompts: list[tuple[int, int, int]]) -> None:
        world = self.world
        longest = min(world.limits.max_context - 1, world.pool.total * world.limits.page_size)
        if not world.scheduler.gate.chunked_prefill:
            longest = min(longest, world.limits.max_step_tokens)
        for shared, last, new_tokens in prompts:
            prompt = [*STEM[: max(1, min(shared, longest) - 1)], last][:longest]
            most = world.scheduler.gate.check(len(prompt), None)
            world.submit(prompt, min(new_tokens, most))

    @precondition(lambda self: len(self.world.in_flight) < 2)
    @rule()
    def launch(self) -> None:
        self.world.launch()

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def land(self) -> None:
        self.world.land()

    @rule(steps=st.integers(1, 8))
    def run(self, steps: int) -> None:
        while self.world.in_flight:
            self.world.land()
        for _ in range(steps):
            self.world.step()
            audit(self.world)

    @precondition(lambda self: self.world.in_flight)
    @rule(choice=st.randoms(use_true_random=False))
    def land_with_a_stop(self, choice) -> None:  # type: ignore[no-untyped-def]
        self.world.land(endings=lambda request: Ending("stop") if choice.random() < 0.5 else None)

    @precondition(lambda self: self.world.in_flight)
    @rule(choice=st.randoms(use_true_random=False))
    def land_with_an_unusable_row(self, choice) -> None:  # type: ignore[no-untyped-def]
        cause = ValueError("NaN")
        self.world.land(endings=lambda request: Ending("error", cause) if choice.random() < 0.5 else None)

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def fail(self) -> None:
        touched = [request for request in self.world.in_flight[0].plan.requests if not request.done]
        error = RuntimeError("the step failed")
        assert self.world.land(error=error) == touched
        assert all(request.finish_reason == "error" and request.error is error for request in touched)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.world.requests))
        was_done, reason = request.done, request.finish_reason
        assert self.world.scheduler.cancel(request) is not was_done
        assert not self.world.scheduler.cancel(request)
        assert request.finish_reason == (reason if was_done else "cancelled")

    @precondition(lambda self: self.world.prefix is not None)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        assert self.world.prefix is not None
        self.world.prefix.evict(data.draw(st.integers(0, self.world.prefix.cached_count)))

    @precondition(lambda self: self.world.prefix is not None)
    @rule()
    def clear(self) -> None:
        assert self.world.prefix is not None
        self.world.prefix.clear()
        assert self.world.prefix.cached_count == 0

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "world"):
            audit(self.world)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        while world.in_flight:
            world.land()
        world.drain(audited=True)
        assert world.pool.free_count + world.scheduler.counters()["pages_cached"] == world.pool.total
        for request in world.requests:
            answer = request.new_token_ids
            assert answer == solo_run(request.tokens[: request.prompt_tokens], len(answer))
            assert request.done
            if request.finish_reason == "length":
                assert len(answer) == request.max_new_tokens


class HybridServing(Serving):
    """The same with recurrent slots and snapshots."""

    hybrid = True


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestDenseServing = Serving.TestCase
TestDenseServing.settings = SETTINGS
TestHybridServing = HybridServing.TestCase
TestHybridServing.settings = SETTINGS
