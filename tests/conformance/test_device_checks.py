"""What device checks make of what they see: on a CPU, where a runtime pretends to replay the steps of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from trivet.capacity import RuntimeCapacity
from trivet.conformance import Asked, Broken, Kit
from trivet.conformance.checks import device
from trivet.conformance.served import Served
from trivet.runtime.handle import Request
from trivet.runtime.step import StepReport
from trivet.sampling.params import Sampling

Prompt = Sequence[int]


class Replaying(Served):
    """Counts each step of a prompt as replayed, and may be told another prompt than was asked for."""

    replays = True
    replayed = 0
    told: Callable[[Prompt], Prompt] = staticmethod(lambda prompt: prompt)

    @property
    def stats(self) -> dict[str, int]:
        return super().stats | {"graph_steps": self.replayed}

    def submit(self, prompt: Prompt, sampling: Sampling) -> Request:
        return super().submit(self.told(prompt), sampling)

    def step(self) -> StepReport:
        report = super().step()
        self.replayed += self.replays and report.path == "prefill"
        return report


Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the check of short prompts; what is served with graphs behaves as the given attributes of `Replaying` say."""
    with Kit(Asked("qwen3")) as kit:
        bench = kit.benches["cpu"]
        serve = bench.serve

        def run(**behaviour: Any) -> Any:
            kind = type("Behaving", (Replaying,), behaviour)

            def served(*arguments: Any, cuda_graphs: bool, **options: Any) -> Served:
                found = serve(*arguments, **options)
                if cuda_graphs:
                    found.__class__ = kind
                return found

            monkeypatch.setattr(bench, "serve", served)
            monkeypatch.setattr(RuntimeCapacity, "prompt_buckets", (16, 64))
            monkeypatch.setattr(device, "_captured", lambda bench: bench.tiny())
            return device.short_prompts_replay.run(bench)

        yield run


def test_replays_that_give_what_eager_steps_give_pass(run: Run) -> None:
    assert run() == {"replayed": len(device.SHORT_PROMPTS), "logprob_nats": 0.0}


def test_prompts_that_are_not_replayed_are_found(run: Run) -> None:
    with pytest.raises(Broken, match=r"observed 0 of the steps .* expected 4"):
        run(replays=False)


@pytest.mark.parametrize("length", device.SHORT_PROMPTS)
def test_a_replay_with_another_last_token_is_found_at_each_length(run: Run, length: int) -> None:
    def told(prompt: Prompt) -> Prompt:
        return [*prompt[:-1], (prompt[-1] + 1) % 16] if len(prompt) == length else prompt

    with pytest.raises(Broken, match=f"behind a replayed prompt of {length} tokens"):
        run(told=staticmethod(told))


def test_a_request_that_a_replay_ends_is_found(run: Run) -> None:
    def finish(self: Replaying, requests: Sequence[Request]) -> list[StepReport]:
        reports = super(Replaying, self).finish(requests)
        found = requests[-1].completion
        failed = attrs.evolve(found, finish_reason="error", error=ValueError("not finite"), logprobs=None)
        requests[-1]._final["completion"] = failed
        return reports

    with pytest.raises(Broken, match="ended with ValueError: not finite, with cuda_graphs=True"):
        run(finish=finish)


def test_two_answers_are_compared_up_to_where_their_tokens_part() -> None:
    from trivet.sampling.logprobs import TokenLogprob

    def answer(*tokens: tuple[int, float, dict[int, float]]) -> Any:
        logprobs = tuple(TokenLogprob(token, value, tuple(top.items())) for token, value, top in tokens)
        return attrs.make_class("Answer", ["logprobs"])(logprobs)

    first = (1, -1.0, {1: -1.0, 2: -1.1})
    near = (2, -1.05, {2: -1.05, 1: -1.08})
    far = (7, -0.5, {7: -0.5})
    assert device._apart_nats(answer(first, first), answer(first, first)) == 0.0
    assert device._apart_nats(answer(first, first), answer(near, far)) == pytest.approx(0.1)
    assert device._apart_nats(answer(first, first), answer(first, far)) == float("inf")
