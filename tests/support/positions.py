"""Hear every position's log-probabilities out of a runtime's steps, those of generated requests included."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tests.support.checkpoints import oracle_logprobs

import trivet
from trivet.scheduler.plan import StepPlan


class EveryPosition:
    """Listens to a runtime: log-probabilities of each position that any step computes, by request and position.

    `Runtime.score` shows every position too, but computes them all; here a request that starts behind a prefix-cache
    hit, decodes, or shares its steps with others is heard as it is served.

    Attributes:
        heard: log-probabilities ``[vocabulary]`` by request id and position.
        paths: the kinds of steps that were heard.
    """

    def __init__(self, runtime: trivet.Runtime) -> None:
        self.heard: dict[int, dict[int, torch.Tensor]] = {}
        self.paths: set[str] = set()
        self._engine = runtime._engine
        self._model = self._engine.model
        self._compute = self._engine._compute
        self._hidden: torch.Tensor | None = None
        self._engine.model = self
        self._engine._compute = self._listen  # type: ignore[method-assign]

    def __call__(self, token_ids: torch.Tensor, step: Any) -> torch.Tensor:
        step.outputs = None  # nothing is dropped
        self._hidden = self._model(token_ids, step)
        return self._hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    @torch.inference_mode()
    def _listen(self, plan: StepPlan) -> Any:
        result = self._compute(plan)
        assert self._hidden is not None
        self.paths.add(plan.path)
        logprobs = torch.log_softmax(self._model.logits(self._hidden).float(), dim=-1)
        first = 0
        for request, start, tokens in zip(plan.requests, plan.starts, plan.lengths, strict=True):
            positions = self.heard.setdefault(request.id, {})
            for offset in range(tokens):
                assert start + offset not in positions, f"request {request.id} computes {start + offset} twice"
                positions[start + offset] = logprobs[first + offset]
            first += tokens
        return result

    def worst_gap(self, model: Any, prompt: Sequence[int], request: trivet.Request) -> float:
        """Largest distance, in nat, from the oracle's log-probabilities over all computed positions of `request`.

        Asserts that these are exactly the positions that it had to compute: its lifetime, less what it found cached.
        NaN if anything heard was not finite.
        """
        completion = request.completion
        tokens = [*prompt, *completion.token_ids[:-1]]
        heard = self.heard[request.id]
        assert sorted(heard) == list(range(completion.cached_tokens, len(tokens)))
        expected = oracle_logprobs(model, tokens)[completion.cached_tokens :]
        return float((torch.stack([heard[position] for position in sorted(heard)]) - expected).abs().max())


def serve(
    runtime: trivet.Runtime, prompts: Iterable[Sequence[int]], samplings: trivet.Sampling | Sequence[trivet.Sampling]
) -> list[trivet.Request]:
    """Submit all `prompts` at once, with one sampling for all or one for each, and step until they are done."""
    prompts = list(prompts)
    each = [samplings] * len(prompts) if isinstance(samplings, trivet.Sampling) else samplings
    requests = [runtime.submit(list(prompt), sampling) for prompt, sampling in zip(prompts, each, strict=True)]
    while not all(request.done for request in requests):
        runtime.step()
    return requests


def drawn(rng: Any, tokens: int, vocabulary: int = 97) -> list[int]:
    """A prompt of random token ids."""
    return [int(token) for token in rng.integers(0, vocabulary, tokens)]
