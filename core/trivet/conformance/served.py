"""A runtime that cannot hang: the checks drive it step by step, within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from trivet.conformance.failure import Broken, broken
from trivet.sampling.params import Sampling

if TYPE_CHECKING:
    from trivet.runtime.engine import Engine
    from trivet.runtime.handle import Request
    from trivet.runtime.results import Completion
    from trivet.runtime.runtime import Runtime
    from trivet.runtime.step import StepReport

IDLE = {"requests_running": 0, "requests_waiting": 0, "pages_held": 0, "pages_reserved": 0}


class Served:
    """One runtime of a check. Closes it on leaving."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._left = 0
        self._stepping = runtime.step
        # Calls that wait, such as score, step through this attribute.
        runtime.step = self._step_within_budget  # type: ignore[method-assign]

    @property
    def engine(self) -> Engine:
        """The engine, to look into."""
        return self.runtime._engine

    @property
    def stats(self) -> dict[str, int]:
        """The runtime's counters."""
        return self.runtime.stats()

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        """Queue a prompt."""
        return self.runtime.submit(list(prompt), sampling)

    def allow(self, steps: int) -> None:
        """Let the next call step this often."""
        self._left = steps

    def step(self) -> StepReport:
        """One step."""
        self.allow(1)
        return self.runtime.step()

    def finish(self, requests: Sequence[Request]) -> list[StepReport]:
        """Step until all `requests` are done; `Broken` if they do not get there."""
        self._left = 40 + 4 * sum(r._scheduled.prompt_tokens + r._scheduled.max_new_tokens for r in requests)
        reports = []
        while not all(request.done for request in requests):
            reports.append(self.runtime.step())
        return reports

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        cause: str = "the family's layers raise in a step of this shape, or its logits are not finite",
    ) -> list[Completion]:
        """Answers to all `prompts` at once. None may fail; `cause` says why one would."""
        samplings = [sampling or Sampling()] * len(prompts) if not isinstance(sampling, Sequence) else sampling
        requests = [self.submit(prompt, each) for prompt, each in zip(prompts, samplings, strict=True)]
        self.finish(requests)
        completions = [request.completion for request in requests]
        for prompt, completion in zip(prompts, completions, strict=True):
            if completion.error is not None:
                raise Broken(
                    observed=f"a request of {len(prompt)} prompt tokens ended as {completion.finish_reason!r} with "
                    f"{type(completion.error).__name__}: {completion.error}",
                    expected="an answer",
                    cause=cause,
                ) from completion.error
        return completions

    def score(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities ``[len(token_ids) - 1, vocabulary]`` of every next token, in float32."""
        self._left = 40 + 4 * len(token_ids)
        vocabulary = self.engine.blueprint.geometry.vocab_size
        scores = self.runtime.score(list(token_ids), top=vocabulary)
        matrix = torch.full((len(token_ids) - 1, vocabulary), float("nan"))
        for row, score in zip(matrix, scores, strict=True):
            ids, values = zip(*score.top, strict=True)
            row[list(ids)] = torch.tensor(values)
        return matrix

    def require_idle(self, after: str) -> None:
        """`Broken` unless everything that requests held is back."""
        stats = self.stats
        wrong = {name: stats[name] for name, value in IDLE.items() if stats[name] != value}
        if stats["slots_free"] != stats["slots_total"]:
            wrong["slots_free"] = stats["slots_free"]
        if stats["pages_free"] + stats["pages_cached"] != stats["pages_total"]:
            wrong.update({name: stats[name] for name in ("pages_free", "pages_cached", "pages_total")})
        if wrong:
            broken(
                observed=f"after {after}: {wrong}",
                expected=f"nothing held: {IDLE}, all {stats['slots_total']} slots free, and every page free or cached",
                cause="an ended request keeps pages, its slot or its reservation: its release is skipped on this way "
                "out, or releases less than it took",
            )

    def _step_within_budget(self) -> StepReport:
        if self._left <= 0:
            stats = self.stats
            broken(
                observed="the requests were not done after as many steps as they have tokens several times over: "
                f"{ {name: stats[name] for name in ('steps', 'requests_running', 'requests_waiting', 'pages_free')} }",
                expected="each step advances a running request, and a waiting one is admitted once it fits",
                cause="the scheduler gives a row no token, never admits a request that fits, or a failed step leaves "
                "its requests open",
            )
        self._left -= 1
        return self._stepping()

    def close(self) -> None:
        """Close the runtime."""
        self.runtime.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def said(completions: Sequence[Completion]) -> list[tuple[object, ...]]:
    """What is the same where two runs are the same: tokens, log-probabilities and how each request ended."""
    return [(c.token_ids, c.logprobs, c.finish_reason) for c in completions]
