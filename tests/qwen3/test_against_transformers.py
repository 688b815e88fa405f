"""Qwen3 in float32 on a CPU says what transformers says, whatever is batched, chunked, paged or cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import make_qwen3
from tests.support.oracle import assert_greedy, assert_scores

import trivet

ATOL = 5e-4

GEOMETRIES: dict[str, dict[str, Any]] = {
    "group 1": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "group 2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "group 4": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "group 5": {"num_attention_heads": 5, "num_key_value_heads": 1},
    "group 6": {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 8},
    "group 7": {"num_attention_heads": 7, "num_key_value_heads": 1},
    "head_dim is not hidden / heads": {"head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "max_position_embeddings": 256,
    },
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "theta 1e6": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "sharded": {"shard_size": "20KB"},
}


def drawn(rng: np.random.Generator, tokens: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 97, tokens)]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_position_and_greedy_token_for_every_geometry(name: str, tmp_path: Path) -> None:
    model = make_qwen3(tmp_path, seed=len(name), **GEOMETRIES[name])
    rng = np.random.default_rng(len(name))
    limits = trivet.Limits(max_requests=3, max_step_tokens=37, max_context=160, page_size=16)
    prompts = [drawn(rng, 90), drawn(rng, 5)]
    with trivet.Runtime.load(tmp_path, device="cpu", limits=limits, autostart=False) as runtime:
        assert_scores(runtime, model, prompts[0], ATOL)
        for _ in ("cold", "warm"):
            outs = runtime.generate(prompts, trivet.Sampling(max_new_tokens=12, logprobs=3))
            for prompt, out in zip(prompts, outs, strict=True):
                assert_greedy(model, prompt, out, ATOL)


@pytest.fixture(scope="module")
def group5(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("group5")
    return directory, make_qwen3(directory, seed=5, num_attention_heads=10, num_key_value_heads=2, head_dim=8)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("max_step_tokens", [1, 2, 7, 64])
def test_any_page_size_and_step_budget(page_size: int, max_step_tokens: int, group5: tuple[Path, Any]) -> None:
    directory, model = group5
    rng = np.random.default_rng(page_size * 100 + max_step_tokens)
    limits = trivet.Limits(3, max_step_tokens, 80, page_size)
    prompts = [drawn(rng, int(n)) for n in rng.integers(1, 40, 4)]
    with trivet.Runtime.load(directory, device="cpu", limits=limits, autostart=False) as runtime:
        assert_scores(runtime, model, drawn(rng, 30), ATOL)
        for _ in ("cold", "warm"):
            outs = runtime.generate(prompts, trivet.Sampling(max_new_tokens=6, logprobs=2))
            for prompt, out in zip(prompts, outs, strict=True):
                assert_greedy(model, prompt, out, ATOL)


@pytest.mark.parametrize("requests", range(1, 9))
def test_one_to_eight_requests_of_different_lengths_at_once(requests: int, group5: tuple[Path, Any]) -> None:
    directory, model = group5
    rng = np.random.default_rng(requests)
    limits = trivet.Limits(max_requests=8, max_step_tokens=48, max_context=128, page_size=3)
    prompts = [drawn(rng, int(n)) for n in rng.integers(1, 100, requests)]
    samplings = [trivet.Sampling(max_new_tokens=int(n), logprobs=1) for n in rng.integers(1, 20, requests)]
    with trivet.Runtime.load(directory, device="cpu", limits=limits, autostart=False) as runtime:
        outs = runtime.generate(prompts, samplings)
        for prompt, sampling, out in zip(prompts, samplings, outs, strict=True):
            assert len(out.token_ids) == sampling.max_new_tokens
            assert_greedy(model, prompt, out, ATOL)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("max_step_tokens", [1, 5, 256])
def test_an_immediate_rerun_hits_every_whole_page_before_the_last_token(
    page_size: int, max_step_tokens: int, group5: tuple[Path, Any]
) -> None:
    directory, _ = group5
    limits = trivet.Limits(2, max_step_tokens, 80, page_size)
    with trivet.Runtime.load(directory, device="cpu", limits=limits, autostart=False) as runtime:
        for tokens in (1, 2, page_size, page_size + 1, 33, 48):
            prompt = [tokens, *drawn(np.random.default_rng(tokens), tokens - 1)]
            cold = runtime.generate([prompt], trivet.Sampling(max_new_tokens=4))[0]
            before = runtime.stats()["prefix_hit_tokens"]
            warm = runtime.generate([prompt], trivet.Sampling(max_new_tokens=4))[0]
            assert warm.cached_tokens == (tokens - 1) // page_size * page_size
            assert runtime.stats()["prefix_hit_tokens"] - before == warm.cached_tokens
            assert warm.token_ids == cold.token_ids


def test_page_lists_longer_than_the_pool_are_served_and_equal_the_cold_result(group5: tuple[Path, Any]) -> None:
    directory, model = group5
    rng = np.random.default_rng(11)
    shared = drawn(rng, 64)
    prompts = [[*shared, *drawn(rng, 3)] for _ in range(6)]
    limits = trivet.Limits(max_requests=6, max_step_tokens=128, max_context=96, page_size=4)
    pages = 16 + 6 * 4  # the shared prefix once, and four pages of its own for each
    with trivet.Runtime.load(directory, device="cpu", limits=limits, kv_pages=pages, autostart=False) as runtime:
        runtime.generate([shared], trivet.Sampling(max_new_tokens=1))
        handles = [runtime.submit(prompt, trivet.Sampling(max_new_tokens=8, logprobs=0)) for prompt in prompts]
        most = 0
        while not all(handle.done for handle in handles):
            runtime.step()
            running = runtime._engine.scheduler.running
            most = max(most, sum(len(request.pages) for request in running))
        assert most > pages, "the test shows nothing unless the lists outgrow the pool"
        for prompt, handle in zip(prompts, handles, strict=True):
            assert handle.completion.cached_tokens >= 60
            assert_greedy(model, prompt, handle.completion, ATOL)
