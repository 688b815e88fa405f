"""Trivet serves the tiny models as transformers runs them, token for token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import trivet
from trivet.runtime.locate import EMBEDDED, locate_checkpoint

RESULTS = json.loads((Path(__file__).parents[2] / "sdk_docs" / "tiny_models" / "RESULTS.json").read_text())


def stories(model: str) -> list[dict[str, Any]]:
    kept = RESULTS[model]["evaluation"]["stories"]
    assert len(kept) == 10
    return kept


@pytest.fixture(scope="module", params=EMBEDDED)
def served(request: pytest.FixtureRequest) -> tuple[str, trivet.Runtime]:
    with trivet.Runtime.load(request.param, device="cpu", dtype="float32", autostart=False) as runtime:
        yield request.param, runtime


def test_the_ten_continuations_are_those_of_transformers_token_for_token(served: tuple[str, trivet.Runtime]) -> None:
    """`RESULTS.json` was written with transformers; all ten are served at once here."""
    model, runtime = served
    kept = stories(model)
    longest = max(story["new_tokens"] for story in kept)
    outs = runtime.generate([story["prompt"] for story in kept], trivet.Sampling(max_new_tokens=longest + 1))
    for story, out in zip(kept, outs, strict=True):
        assert out.text == story["continuation"]
        assert out.finish_reason == "stop"


def test_transformers_says_the_same_today(served: tuple[str, trivet.Runtime]) -> None:
    from transformers import AutoModelForCausalLM

    name, runtime = served
    oracle = AutoModelForCausalLM.from_pretrained(locate_checkpoint(name), dtype=torch.float32).eval()
    assert runtime.tokenizer is not None
    ids = runtime.tokenizer.encode(stories(name)[0]["prompt"])
    with torch.inference_mode():
        expected = oracle.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=80)[0, len(ids) :]
    out = runtime.generate([ids], trivet.Sampling(max_new_tokens=80))[0]
    assert list(out.token_ids) == expected.tolist()


def test_chat_answers_end_by_the_end_token(served: tuple[str, trivet.Runtime]) -> None:
    _, runtime = served
    out = runtime.chat([{"role": "user", "content": "What is two plus three?"}], trivet.Sampling(max_new_tokens=60))
    assert out.finish_reason == "stop"
    assert out.text and "<|" not in out.text
