"""Steps of one short prompt are replayed, and give what they give when every kernel of them is launched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.gpu import test_hybrid_on_cuda as hybrid
from tests.gpu import test_qwen3_on_cuda as dense
from tests.gpu.test_hybrid_on_cuda import drawn_prompt
from tests.gpu.test_pinned import REPORTED, said

import trivet

LIMITS = trivet.Limits(max_requests=64, max_step_tokens=512, max_context=1024, page_size=16)
LENGTHS = (64, 3, 1, 2, 15, 16, 17, 63, 65, 100, 5)
LONGEST = 64
EDGES = (1, 15, 16, 17, 63, 64)
"""Tokens of prompts: around the sizes that are captured."""
TOP_NATS = 0.25
"""Between the five most probable tokens of two runs in bfloat16: on a CPU, bfloat16 and float32 are up to 0.12 apart in
these models, and a prompt and the one without its last token at least 0.8 for the prompts that are drawn here."""
Load = Callable[..., trivet.Runtime]
Top = dict[int, float]
"""The most probable first new tokens, with their log-probabilities."""


@pytest.fixture(params=["dense", "hybrid"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Load:
    """Loads a tiny model with room for 64 rows."""
    options: dict[str, Any] = {"limits": LIMITS, "kv_pages": 512}
    if request.param == "dense":
        return partial(dense.load, dense.make(tmp_path, 5, 128), "flashinfer", **options)
    return partial(hybrid.load, hybrid.make(tmp_path, 6, 3), **options)


def test_replayed_prompts_of_any_length_give_the_same_bits_under_the_pinned_policy(load: Load) -> None:
    asked = [drawn_prompt(tokens, tokens) for tokens in LENGTHS]
    found = {}
    for captured in (True, False):
        with load(numeric_policy="pinned", cuda_graphs=captured, prefix_cache=False) as runtime:
            outs = []
            for prompt in asked:
                before = runtime.stats()["graph_steps"]
                handle = runtime.submit(prompt, REPORTED)
                assert runtime.step().path == "prefill"
                replayed = runtime.stats()["graph_steps"] - before
                assert replayed == int(captured and len(prompt) <= LONGEST)
                runtime.run_until_idle()
                outs.append(handle.completion)
            found[captured] = said(outs)
    assert found[True] == found[False]


def test_replayed_prompts_are_as_likely_as_eager_ones_and_a_token_fewer_would_show(
    load: Load, record_property: Callable[[str, object], None]
) -> None:
    asked = {tokens: drawn_prompt(tokens, tokens) for tokens in EDGES}
    sampling = trivet.Sampling(max_new_tokens=1, temperature=0.0, ignore_eos=True, logprobs=5)
    tops: dict[bool, dict[int, Top]] = {}
    for captured in (True, False):
        with load(numeric_policy="tuned", cuda_graphs=captured, prefix_cache=False) as runtime:
            tops[captured] = {tokens: top(runtime, prompt, sampling) for tokens, prompt in asked.items()}
            assert runtime.stats()["graph_steps"] == (len(EDGES) if captured else 0)
            if not captured:
                others = {tokens: prompt[:-1] or [prompt[0] + 1] for tokens, prompt in asked.items()}
                shorter = {tokens: top(runtime, prompt, sampling) for tokens, prompt in others.items()}
    far = {tokens: apart(tops[True][tokens], tops[False][tokens]) for tokens in EDGES}
    control = {tokens: apart(tops[True][tokens], shorter[tokens]) for tokens in EDGES}
    record_property("nats", str(far))
    record_property("control_nats", str(control))
    assert max(far.values()) <= TOP_NATS, far
    assert min(control.values()) > 2 * TOP_NATS, control


def top(runtime: trivet.Runtime, prompt: list[int], sampling: trivet.Sampling) -> Top:
    (out,) = runtime.generate([prompt], sampling)
    return dict(out.logprobs[0].top)


def apart(first: Top, second: Top) -> float:
    """The most that a token of either is apart; one that the other does not have is no more likely than its last."""
    return max(
        abs(first.get(token, min(first.values())) - second.get(token, min(second.values())))
        for token in first.keys() | second.keys()
    )


def test_what_a_hit_leaves_of_a_prompt_is_replayed_and_is_as_likely_as_after_a_cold_start(load: Load) -> None:
    sampling = trivet.Sampling(max_new_tokens=2, temperature=0.0, ignore_eos=True, logprobs=5)
    prompt = drawn_prompt(256 + 20)
    with load() as runtime:
        (cold,) = runtime.generate([prompt], sampling)
        before = runtime.stats()["graph_steps"]
        handle = runtime.submit(prompt, sampling)
        report = runtime.step()
        assert report.path == "prefill" and report.prefill_tokens <= LONGEST
        assert runtime.stats()["graph_steps"] == before + 1
        runtime.run_until_idle()
        assert handle.completion.cached_tokens >= 256
        likely = dict(cold.logprobs[0].top)
        again = [(likely[token], value) for token, value in handle.completion.logprobs[0].top if token in likely]
        assert len(again) >= 3
        assert max(abs(first - second) for first, second in again) < 0.25


def test_a_scored_prompt_and_one_beside_others_are_not_replayed(load: Load) -> None:
    with load() as runtime:
        runtime.score(drawn_prompt(9))
        for seed in range(2):
            runtime.submit(drawn_prompt(9, seed), trivet.Sampling(max_new_tokens=1))
        report = runtime.step()
        assert (report.path, report.rows) == ("prefill", 2)
        assert runtime.stats()["graph_steps"] == 0
        runtime.run_until_idle()
