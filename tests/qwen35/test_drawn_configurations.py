"""Whatever geometry, limits, stride, pool and budget are drawn: every position is right and everything comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import make_qwen35
from tests.support.poison import poison
from tests.support.positions import EveryPosition, drawn

import trivet

ATOL = 2e-3


def drawn_config(rng: np.random.Generator) -> dict[str, Any]:
    layers, kv_heads, key_heads = (int(n) for n in rng.integers(1, (5, 3, 3)))
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": float(rng.choice([0.25, 0.5]))}
    if rng.integers(2):
        rope["mrope_section"] = [1, 1, 0]
    return {
        "num_hidden_layers": layers,
        "layer_types": [str(rng.choice(["linear_attention", "full_attention"], p=[0.65, 0.35])) for _ in range(layers)],
        "num_attention_heads": kv_heads * int(rng.choice([1, 4, 6])),
        "num_key_value_heads": kv_heads,
        "head_dim": int(rng.choice([8, 16, 24])),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * int(rng.integers(1, 4)),
        "linear_key_head_dim": int(rng.choice([4, 8, 12])),
        "linear_value_head_dim": int(rng.choice([4, 8, 16])),
        "linear_conv_kernel_dim": int(rng.integers(1, 5)),
        "hidden_size": int(rng.choice([24, 48])),
        "tie_word_embeddings": bool(rng.integers(2)),
        "rope_parameters": rope,
    }


def drawn_settings(rng: np.random.Generator) -> dict[str, Any]:
    page_size, context = int(rng.choice([1, 3, 16])), int(rng.integers(8, 160))
    step_tokens = int(rng.choice([1, 2, 3, 5, 17, 63, 64, 65, 128, 400]))
    settings: dict[str, Any] = {"limits": trivet.Limits(int(rng.integers(1, 7)), step_tokens, context, page_size)}
    if rng.integers(2):
        settings["snapshot_stride"] = page_size * int(rng.integers(1, 5))
    if not rng.integers(3):
        settings["snapshot_bytes"] = int(rng.choice([0, 3000, 20000]))
    if not rng.integers(3):
        settings["kv_pages"] = int(rng.integers(1, -(-context // page_size) + 3))
    return settings


@pytest.mark.parametrize("seed", range(20))
def test_turns_that_share_prefixes_through_a_drawn_runtime(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    model = make_qwen35(tmp_path, seed=seed, **drawn_config(rng))
    settings = drawn_settings(rng)
    limits = settings["limits"]
    held = settings.get("kv_pages", limits.logical_pages) * limits.page_size
    base = drawn(rng, limits.max_context)

    def fits(prompt: list[int], new: int) -> bool:
        return len(prompt) + new <= limits.max_context and len(prompt) + new - 1 <= held

    with trivet.Runtime.load(tmp_path, device="cpu", autostart=False, **settings) as runtime:
        ears = EveryPosition(runtime)
        prompts = []
        for length in rng.integers(1, limits.max_context, 8):
            shared = int(rng.integers(0, length + 1))
            prompts.append([*base[:shared], *drawn(rng, int(length) - shared)])
        for _ in range(3):
            news = [int(n) for n in rng.integers(1, 7, len(prompts))]
            turns = [(prompt, new) for prompt, new in zip(prompts, news, strict=True) if fits(prompt, new)]
            requests = [runtime.submit(p, trivet.Sampling(max_new_tokens=n)) for p, n in turns]
            dropped = int(rng.integers(8))  # cancelled on the way, if there is such a request
            while not all(request.done for request in requests):
                poison(runtime)
                runtime.step()
                if dropped < len(requests) and not rng.integers(3):
                    requests[dropped].cancel()
            for (prompt, _), request in zip(turns, requests, strict=True):
                if request.completion.finish_reason != "cancelled":
                    assert ears.worst_gap(model, prompt, request) <= ATOL
            stats = runtime.stats()
            assert stats["pages_held"] == stats["pages_reserved"] == 0
            assert stats["slots_free"] == limits.max_requests
            prompts = [
                [*prompt, *request.completion.token_ids, *drawn(rng, 2)] if rng.integers(2) else prompt
                for (prompt, _), request in zip(turns, requests, strict=True)
            ]
