"""Hold what a runtime says against a full forward of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.support.checkpoints import oracle_logprobs

import trivet

TIE_NATS = 2e-3
"""Greedy tokens may differ where the best two log-probabilities are nearer than this."""


def assert_scores(
    runtime: trivet.Runtime, model: Any, token_ids: Sequence[int], atol: float, top: int | None = None
) -> None:
    """Every position's log-probabilities, over the whole vocabulary unless `top` says less, equal the oracle's."""
    expected = oracle_logprobs(model, list(token_ids))
    vocabulary = expected.shape[-1]
    scores = runtime.score(list(token_ids), top=vocabulary if top is None else top)
    assert len(scores) == len(token_ids) - 1
    for position, score in enumerate(scores):
        assert score.token_id == token_ids[position + 1]
        ids = torch.tensor([token for token, _ in score.top])
        values = torch.tensor([value for _, value in score.top])
        torch.testing.assert_close(values, expected[position][ids], atol=atol, rtol=0)
        assert abs(score.logprob - expected[position][score.token_id].item()) <= atol


def assert_greedy(model: Any, prompt: Sequence[int], completion: trivet.Completion, atol: float) -> None:
    """Each new token is the oracle's choice given the ones before, but for ties; so are its log-probabilities."""
    new = list(completion.token_ids)
    expected = oracle_logprobs(model, [*prompt, *new])
    assert completion.logprobs is not None and len(completion.logprobs) == len(new)
    for index, token in enumerate(new):
        row = expected[len(prompt) - 1 + index]
        best = row.max().item()
        assert best - row[token].item() <= TIE_NATS, f"token {index}: {token} is {best - row[token].item():.4f} nat off"
        assert abs(completion.logprobs[index].logprob - row[token].item()) <= atol
        for other, value in completion.logprobs[index].top:
            assert abs(value - row[other].item()) <= atol
