"""Every geometry of the family, cold, warm and decoding, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import make_qwen35
from tests.support.oracle import assert_greedy, assert_scores
from tests.support.positions import EveryPosition, drawn, serve

import trivet

ATOL = 2e-3
LINEAR, FULL = "linear_attention", "full_attention"


def rope(factor: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor, **more}


GEOMETRIES: dict[str, dict[str, Any]] = {
    "group 6": {"num_attention_heads": 12, "num_key_value_heads": 2},
    "group 4": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "group 5": {"num_attention_heads": 5, "num_key_value_heads": 1},
    "expansion 1": {"linear_num_key_heads": 3, "linear_num_value_heads": 3},
    "expansion 2": {"linear_num_key_heads": 3, "linear_num_value_heads": 6},
    "expansion 3": {"linear_num_key_heads": 2, "linear_num_value_heads": 6},
    "wide keys": {"linear_key_head_dim": 16, "linear_value_head_dim": 8},
    "wide values": {"linear_key_head_dim": 4, "linear_value_head_dim": 16},
    "kernel 1": {"linear_conv_kernel_dim": 1},
    "kernel 2": {"linear_conv_kernel_dim": 2},
    "kernel 3": {"linear_conv_kernel_dim": 3},
    "kernel 4": {"linear_conv_kernel_dim": 4},
    "rotary 0.25": {"rope_parameters": rope(0.25)},
    "rotary 0.5": {"rope_parameters": rope(0.5)},
    "rotary 1": {"rope_parameters": rope(1.0)},
    "mrope": {"rope_parameters": rope(0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)},
    "mrope as published": {"head_dim": 256, "rope_parameters": rope(0.25, mrope_section=[11, 11, 10])},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.5,
        },
        "max_position_embeddings": 256,
    },
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "full first": {"layer_types": [FULL, LINEAR, LINEAR, LINEAR]},
    "two full in a row": {"layer_types": [LINEAR, FULL, FULL, LINEAR]},
    "full last but one": {"layer_types": [LINEAR, LINEAR, FULL, LINEAR, LINEAR], "num_hidden_layers": 5},
    "all linear": {"layer_types": [LINEAR] * 3, "num_hidden_layers": 3},
    "all full": {"layer_types": [FULL] * 3, "num_hidden_layers": 3},
    "one linear layer": {"layer_types": [LINEAR], "num_hidden_layers": 1},
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_position_and_greedy_token_for_every_geometry(name: str, tmp_path: Path) -> None:
    model = make_qwen35(tmp_path, seed=len(name), **GEOMETRIES[name])
    rng = np.random.default_rng(len(name))
    limits = trivet.Limits(max_requests=3, max_step_tokens=37, max_context=200, page_size=16)
    prompts = [drawn(rng, 130), drawn(rng, 1), drawn(rng, 33)]
    sampling = trivet.Sampling(max_new_tokens=10, logprobs=3)
    with trivet.Runtime.load(tmp_path, device="cpu", limits=limits, autostart=False) as runtime:
        assert_scores(runtime, model, prompts[0], ATOL)
        ears = EveryPosition(runtime)
        for warmth in ("cold", "warm"):
            for prompt, request in zip(prompts, serve(runtime, prompts, sampling), strict=True):
                assert request.completion.cached_tokens == (0 if warmth == "cold" else (len(prompt) - 1) // 16 * 16)
                assert ears.worst_gap(model, prompt, request) <= ATOL
                assert_greedy(model, prompt, request.completion, ATOL)


def test_layers_follow_the_interval_where_layer_types_are_not_listed(tmp_path: Path) -> None:
    kinds = [LINEAR, FULL, LINEAR, FULL]
    model = make_qwen35(tmp_path, seed=1, layer_types=kinds)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("layer_types") == kinds
    (tmp_path / "config.json").write_text(json.dumps(config | {"full_attention_interval": 2}))
    with trivet.Runtime.load(tmp_path, device="cpu", limits=trivet.Limits(1, 64, 64), autostart=False) as runtime:
        assert_scores(runtime, model, drawn(np.random.default_rng(1), 50), ATOL)


@pytest.mark.parametrize("factor", [0.25, 0.5])
@pytest.mark.parametrize("section", ["beside rope_parameters", "beside rope_scaling", "beside nothing"])
def test_the_rotary_factor_is_read_from_beside_the_rope_section_too(
    factor: float, section: str, tmp_path: Path
) -> None:
    model = make_qwen35(tmp_path, seed=2, rope_parameters=rope(factor))
    config = json.loads((tmp_path / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    config["partial_rotary_factor"] = factor
    if section == "beside rope_parameters":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    else:
        config["rope_theta"] = theta
    if section == "beside rope_scaling":
        config["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1, 0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with trivet.Runtime.load(tmp_path, device="cpu", limits=trivet.Limits(1, 64, 64), autostart=False) as runtime:
        assert_scores(runtime, model, drawn(np.random.default_rng(2), 50), ATOL)


def test_a_quarter_of_the_head_is_rotated_where_the_config_is_silent(tmp_path: Path) -> None:
    model = make_qwen35(tmp_path, seed=3, rope_parameters=rope(0.25))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]["partial_rotary_factor"]
    config.pop("partial_rotary_factor", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with trivet.Runtime.load(tmp_path, device="cpu", limits=trivet.Limits(1, 64, 64), autostart=False) as runtime:
        assert_scores(runtime, model, drawn(np.random.default_rng(3), 50), ATOL)
