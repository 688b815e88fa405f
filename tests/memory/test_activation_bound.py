"""The activation line bounds what a step keeps alive, whatever the geometry, the limits and the mix of rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import trivet
from trivet.conformance.checks.ledger import PARTS, metered_parts
from trivet.layers.decoder import Decoder
from trivet.runtime import load
from trivet.runtime.profile import Profile, profiled_bounds
from trivet_qwen3.model import Qwen3Layer
from trivet_qwen35.model import Qwen35Layer

LOOSEST, LOOSEST_PUBLISHED = 40, 8
"""How many times what an odd geometry, and a published one, uses: the bound also covers mixes of rows and copies inside
operations that no test sees."""


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    """What the start-up profiles of a test measure."""
    measured: list[Profile] = []
    run_profile = load.run_profile
    monkeypatch.setattr(load, "run_profile", lambda *args: measured.append(run_profile(*args)) or measured[-1])
    return measured


def drawn_config(rng: random.Random) -> dict[str, Any]:
    kv_heads, family = rng.choice([1, 2, 4]), rng.choice(["qwen3", "qwen3_5_text", "qwen3_5_text"])
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": rng.choice([7, 97, 3000, 60_000]),
        "hidden_size": rng.choice([4, 16, 128]),
        "intermediate_size": rng.choice([4, 32, 700]),
        "num_hidden_layers": 2,
        "num_attention_heads": kv_heads * rng.choice([1, 2, 5]),
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([4, 16, 64]),
        "max_position_embeddings": 8192,
        "tie_word_embeddings": rng.random() < 0.5,
        "dtype": rng.choice(["float32", "bfloat16"]),
        "partial_rotary_factor": 0.5,
    }
    if family != "qwen3":
        key_heads, kinds = rng.choice([1, 2, 4]), ["linear_attention", "full_attention"]
        config |= {
            "layer_types": [rng.choice(kinds), rng.choice(kinds)],
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": key_heads * rng.choice([1, 3]),
            "linear_key_head_dim": rng.choice([4, 32]),
            "linear_value_head_dim": rng.choice([4, 32]),
            "linear_conv_kernel_dim": rng.choice([1, 2, 4, 24]),
        }
    return config


def drawn_limits(rng: random.Random) -> trivet.Limits:
    return trivet.Limits(
        max_requests=rng.choice([1, 2, 8, 40]),
        max_step_tokens=rng.choice([1, 7, 64, 65, 300]),
        max_context=rng.choice([3, 17, 300, 3000]),
        page_size=rng.choice([1, 3, 16, 1000]),
    )


def submit_mix(runtime: trivet.Runtime, limits: trivet.Limits, vocabulary: int, rng: random.Random) -> None:
    """Rows that pad badly: all of two tokens, short ones beside a long one, or of any length."""
    step_tokens = limits.max_step_tokens
    kind = rng.choice(["pairs", "short", "any", "half", "long"])
    for place in range(rng.randint(1, limits.max_requests)):
        tokens = {
            "pairs": 2,
            "short": rng.randint(2, 9),
            "any": rng.choice([1, 5, 20, step_tokens]),
            "half": step_tokens // 2 if place == 0 else 2,
            "long": step_tokens,
        }[kind]
        prompt = [rng.randrange(vocabulary) for _ in range(max(1, min(tokens, limits.max_context - 2)))]
        sampling = trivet.Sampling(
            max_new_tokens=2,
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            logprobs=rng.choice([None, 20]),
        )
        runtime.submit(prompt, sampling)


@pytest.mark.parametrize("seed", range(16))
def test_no_part_of_a_step_keeps_more_alive_than_was_planned_for_it(
    seed: int, tmp_path: Path, profiles: list[Profile]
) -> None:
    rng = random.Random(seed)
    config, limits = drawn_config(rng), drawn_limits(rng)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with trivet.Runtime.load(tmp_path, device="cpu", limits=limits, weights="random", autostart=False) as runtime:
        blueprint = runtime._engine.blueprint
        bounds = profiled_bounds(blueprint.capacity, blueprint.selections)
        planned_bytes = runtime.memory.line("activations").bytes
        assert planned_bytes == max(bounds.forward_bytes, bounds.sampling_bytes)
        with metered_parts(runtime._engine) as meter:
            for _ in range(3):
                submit_mix(runtime, limits, config["vocab_size"], rng)
                for _ in range(12):
                    runtime.step()
            tokens = min(limits.max_step_tokens, limits.max_context)
            runtime.score([rng.randrange(config["vocab_size"]) for _ in range(tokens)], top=5)
        for part in PARTS:
            assert getattr(meter, part) <= getattr(bounds, part), (part, config, limits)
        most_bytes = max(profiles[0].peak_bytes, meter.forward_bytes, meter.sampling_bytes)
        assert planned_bytes <= LOOSEST * most_bytes, (config, limits)


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-qwen35"])
def test_layers_that_each_keep_a_few_copies_of_the_stream_are_refused_by_their_own_bound(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = {"tiny-qwen3": Qwen3Layer, "tiny-qwen35": Qwen35Layer}[model]
    compute, kept = layer.__call__, []

    def keeping(self: Any, hidden: torch.Tensor, step: Any) -> torch.Tensor:
        kept.append(hidden.float().expand(4, -1, -1).clone())
        return compute(self, hidden, step)

    monkeypatch.setattr(layer, "__call__", keeping)
    with pytest.raises(trivet.PluginError, match=r"its layers kept .* more than their planned bound .* free them"):
        trivet.Runtime.load(model, device="cpu", autostart=False)


def test_logits_of_more_rows_than_are_asked_for_are_refused_by_the_bound_of_sampling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: logits(self, hidden.repeat(2000, 1))[: len(hidden)])
    with pytest.raises(trivet.PluginError, match=r"its logits and sampling kept .* more than their planned bound"):
        trivet.Runtime.load("tiny-qwen3", device="cpu", autostart=False)


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("qwen3", {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128}),
        ("qwen3_5_text", {"hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16, "head_dim": 256}),
    ],
)
def test_the_bound_of_a_published_geometry_is_of_the_size_of_what_it_uses(
    model_type: str, sizes: dict[str, int], tmp_path: Path, profiles: list[Profile]
) -> None:
    config = {
        "model_type": model_type,
        "vocab_size": 2000,
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention" if model_type == "qwen3_5_text" else "full_attention"],
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        **sizes,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    limits = trivet.Limits(max_requests=16, max_step_tokens=256, max_context=1024, page_size=16)
    with trivet.Runtime.load(tmp_path, device="cpu", limits=limits, weights="random", autostart=False) as runtime:
        planned_bytes = runtime.memory.line("activations").bytes
    assert profiles[0].peak_bytes <= planned_bytes <= LOOSEST_PUBLISHED * profiles[0].peak_bytes
