"""Qwen3.5 in float32 on a CPU says what transformers says at every position, however prompts are cut and mixed."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests.qwen35.conftest import Group6
from tests.support.checkpoints import oracle_logprobs
from tests.support.oracle import assert_scores
from tests.support.positions import EveryPosition, drawn, serve

import trivet

ATOL = 2e-3
STEPS = (1, 2, 3, 5, 63, 64, 65, 128, 1024)
PAGES = (1, 3, 16)
CASES = [(tokens, page) for tokens in STEPS for page in PAGES]


@pytest.mark.parametrize(("max_step_tokens", "page_size"), CASES)
def test_mixed_steps_cold_and_warm_at_every_chunking_and_page_size(
    max_step_tokens: int, page_size: int, group6: Group6
) -> None:
    requests = 1 + CASES.index((max_step_tokens, page_size)) % 6
    rng = np.random.default_rng([max_step_tokens, page_size])
    longest = 400 if max_step_tokens > 5 or requests == 1 else 90
    prompts = [drawn(rng, longest)]
    for length in rng.integers(1, longest // 2, requests - 1):
        shared = int(rng.integers(0, length + 1))
        prompts.append(prompts[0][:shared] + drawn(rng, int(length) - shared))
    new_tokens = [9, *rng.integers(1, 8, requests - 1)]
    samplings = [trivet.Sampling(max_new_tokens=int(n)) for n in new_tokens]
    limits = trivet.Limits(max_requests=6, max_step_tokens=max_step_tokens, max_context=420, page_size=page_size)
    with trivet.Runtime.load(group6.directory, device="cpu", limits=limits, autostart=False) as runtime:
        ears = EveryPosition(runtime)
        for _ in ("cold", "warm"):
            first = runtime.submit(prompts[0], samplings[0])
            for _ in range(3):
                runtime.step()
            rest = serve(runtime, prompts[1:], samplings[1:])
            runtime.run_until_idle()
            for prompt, request in zip(prompts, (first, *rest), strict=True):
                assert ears.worst_gap(group6.model, prompt, request) <= ATOL
        assert ("mixed" in ears.paths) == (requests > 1 and max_step_tokens > 1)
        warm = serve(runtime, prompts, samplings)
        assert [request.completion.cached_tokens for request in warm] == [
            (len(prompt) - 1) // page_size * page_size for prompt in prompts
        ]


@pytest.mark.parametrize("requests", range(1, 7))
def test_one_to_six_requests_that_come_one_by_one_and_decode_beside_prefills(requests: int, group6: Group6) -> None:
    rng = np.random.default_rng(requests)
    prompts = [drawn(rng, int(n)) for n in rng.integers(1, 120, requests)]
    limits = trivet.Limits(max_requests=6, max_step_tokens=31, max_context=160, page_size=3)
    with trivet.Runtime.load(group6.directory, device="cpu", limits=limits, autostart=False) as runtime:
        ears = EveryPosition(runtime)
        handles = []
        for prompt in prompts:
            handles.append(runtime.submit(prompt, trivet.Sampling(max_new_tokens=int(rng.integers(1, 30)))))
            for _ in range(int(rng.integers(1, 6))):
                runtime.step()
        runtime.run_until_idle()
        for prompt, handle in zip(prompts, handles, strict=True):
            assert ears.worst_gap(group6.model, prompt, handle) <= ATOL


@pytest.mark.parametrize("max_step_tokens", STEPS)
def test_scores_of_every_position_at_every_chunking(max_step_tokens: int, group6: Group6) -> None:
    tokens = 400 if max_step_tokens > 5 else 120
    limits = trivet.Limits(max_requests=2, max_step_tokens=max_step_tokens, max_context=400, page_size=16)
    with trivet.Runtime.load(group6.directory, device="cpu", limits=limits, autostart=False) as runtime:
        prompt = drawn(np.random.default_rng(max_step_tokens), tokens)
        assert_scores(runtime, group6.model, prompt, ATOL)


def test_a_context_over_several_key_value_tiles(group6: Group6) -> None:
    rng = np.random.default_rng(9)
    limits = trivet.Limits(max_requests=2, max_step_tokens=512, max_context=2300, page_size=16)
    with trivet.Runtime.load(group6.directory, device="cpu", limits=limits, autostart=False) as runtime:
        ears = EveryPosition(runtime)
        prompts = [drawn(rng, 2200), drawn(rng, 5)]
        for prompt, request in zip(prompts, serve(runtime, prompts, trivet.Sampling(max_new_tokens=4)), strict=True):
            assert ears.worst_gap(group6.model, prompt, request) <= ATOL


def test_served_in_bfloat16_it_is_as_near_to_float32_as_transformers_is_in_bfloat16(group6: Group6) -> None:
    tokens = drawn(np.random.default_rng(10), 200)
    exact = oracle_logprobs(group6.model, tokens)
    rounded = oracle_logprobs(copy.deepcopy(group6.model).bfloat16(), tokens)
    limits = trivet.Limits(max_requests=1, max_step_tokens=47, max_context=200, page_size=16)
    with trivet.Runtime.load(
        group6.directory, device="cpu", dtype="bfloat16", limits=limits, autostart=False
    ) as runtime:
        ears = EveryPosition(runtime)
        runtime.score(tokens)
        heard = torch.stack([ears.heard[0][position] for position in range(200)])
    assert (heard - exact).abs().mean() <= 1.3 * (rounded - exact).abs().mean()
