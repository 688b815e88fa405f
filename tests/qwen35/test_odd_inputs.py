"""Odd limits are served, odd files are refused with what was found, what was expected and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.qwen35.conftest import Group6
from tests.support.checkpoints import make_qwen35
from tests.support.multimodal import unserved_tensors, write_multimodal
from tests.support.oracle import assert_scores
from tests.support.positions import EveryPosition, drawn, serve

import trivet

ATOL = 2e-3
LIMITS = trivet.Limits(2, 16, 64, 16)


def load(directory: Path, limits: trivet.Limits = LIMITS, **settings: Any) -> trivet.Runtime:
    return trivet.Runtime.load(directory, device="cpu", limits=limits, autostart=False, **settings)


def text_only(group6: Group6, target: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((group6.directory / name).read_bytes())
    return target


# Limits.


def test_a_pool_smaller_than_one_context_serves_what_fits_and_refuses_the_rest_at_the_call(group6: Group6) -> None:
    rng = np.random.default_rng(0)
    limits = trivet.Limits(max_requests=4, max_step_tokens=32, max_context=200, page_size=16)
    with load(group6.directory, limits, kv_pages=3) as runtime:
        ears = EveryPosition(runtime)
        prompts = [drawn(rng, 40), drawn(rng, 12), drawn(rng, 44), drawn(rng, 1)]
        for _ in range(2):
            requests = serve(runtime, prompts, trivet.Sampling(max_new_tokens=5))
            for prompt, request in zip(prompts, requests, strict=True):
                assert ears.worst_gap(group6.model, prompt, request) <= ATOL
        before = runtime.stats()
        with pytest.raises(trivet.RequestRejected, match=r"4 KV pages of 16 tokens.*the pool has 3"):
            runtime.submit(drawn(rng, 45), trivet.Sampling(max_new_tokens=5))
        assert runtime.stats() == before


def test_six_requests_take_turns_at_one_token_a_step(group6: Group6) -> None:
    rng = np.random.default_rng(1)
    limits = trivet.Limits(max_requests=6, max_step_tokens=1, max_context=64, page_size=3)
    prompts = [drawn(rng, int(n)) for n in rng.integers(1, 40, 6)]
    with load(group6.directory, limits) as runtime:
        ears = EveryPosition(runtime)
        for prompt, request in zip(prompts, serve(runtime, prompts, trivet.Sampling(max_new_tokens=4)), strict=True):
            assert ears.worst_gap(group6.model, prompt, request) <= ATOL


@pytest.mark.parametrize(("page_size", "stride"), [(64, 64), (256, 256), (16, 1024)])
def test_a_stride_or_page_longer_than_any_context_serves_without_hits(
    page_size: int, stride: int, group6: Group6
) -> None:
    prompt = drawn(np.random.default_rng(2), 50)
    with load(group6.directory, trivet.Limits(2, 16, 64, page_size), snapshot_stride=stride) as runtime:
        ears = EveryPosition(runtime)
        for _ in range(2):
            (request,) = serve(runtime, [prompt], trivet.Sampling(max_new_tokens=5))
            assert request.completion.cached_tokens == 0
            assert ears.worst_gap(group6.model, prompt, request) <= ATOL
        assert runtime.stats()["prefix_grain_tokens"] == stride, "no prompt reaches a grain, so that none is hit"
        reason = f"snapshots would lie at multiples of {stride} tokens, and max_context is 64"
        assert runtime.memory.line("snapshots").source == f"hybrid prefix caching is off: {reason}"


def test_a_request_may_fill_the_context_to_its_last_token(group6: Group6) -> None:
    rng = np.random.default_rng(3)
    with load(group6.directory) as runtime:
        ears = EveryPosition(runtime)
        for tokens in (1, 63):
            prompt = drawn(rng, tokens)
            (request,) = serve(runtime, [prompt], trivet.Sampling(max_new_tokens=64 - tokens))
            assert len(request.completion.token_ids) == 64 - tokens
            assert ears.worst_gap(group6.model, prompt, request) <= ATOL


@pytest.mark.parametrize(
    "settings",
    [
        {"snapshot_bytes": -1},
        {"snapshot_bytes": 1.5},
        {"snapshot_bytes": True},
        {"snapshot_bytes": 2**40},
        {"snapshot_bytes": 10**30},
        {"snapshot_stride": 0},
        {"snapshot_stride": -16},
        {"snapshot_stride": "16"},
        {"kv_pages": 0},
        {"kv_pages": 2**31},
        {"limits": trivet.Limits(2**31 - 1, 16, 64, 16)},
        {"limits": trivet.Limits(2**27, 16, 64, 16)},
    ],
    ids=repr,
)
def test_a_setting_that_cannot_be_served_is_refused_before_anything_is_allocated(
    settings: dict[str, Any], group6: Group6
) -> None:
    """Planning and loading refuse alike; 2**27 requests have more state than any machine of tests has memory."""
    errors = (trivet.ConfigError, trivet.CapacityExceeded, trivet.MemoryBudgetError)
    settings = {"limits": LIMITS} | settings
    with pytest.raises(errors):
        trivet.plan_memory(group6.directory, device_memory_bytes=2**33, **settings)
    with pytest.raises(errors):
        trivet.Runtime.load(group6.directory, device="cpu", autostart=False, **settings)


# Configs.


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "layer_types"),
        ({"layer_types": [], "num_hidden_layers": 0}, "num_hidden_layers"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"linear_num_value_heads": 5}, "value heads"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads"),
        ({"linear_key_head_dim": -1}, "linear_key_head_dim"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        ({"linear_value_head_dim": 2**40}, "linear_value_head_dim"),
        ({"num_attention_heads": 5}, "KV heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.0}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.05}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type"),
        ({"vocab_size": None}, "vocab_size"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_is_not_served_is_refused_naming_the_key(
    changes: dict[str, Any], named: str, group6: Group6, tmp_path: Path
) -> None:
    config = json.loads((group6.directory / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(trivet.ConfigError, match=named):
        trivet.plan_memory(tmp_path, limits=LIMITS)


@pytest.mark.parametrize("key", ["linear_value_head_dim", "linear_key_head_dim", "linear_num_value_heads"])
def test_a_config_with_more_state_than_memory_is_refused_in_no_time(key: str, group6: Group6, tmp_path: Path) -> None:
    config = json.loads((group6.directory / "config.json").read_text()) | {key: 2**30}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((trivet.CapacityExceeded, trivet.MemoryBudgetError)):
        trivet.Runtime.load(tmp_path, device="cpu", limits=LIMITS, weights="random", autostart=False)


# Files.


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.linear_attn.A_log", (5,)),
        ("model.layers.0.linear_attn.conv1d.weight", (80, 4)),
        ("model.layers.1.linear_attn.in_proj_qkv.weight", (81, 48)),
        ("model.layers.3.self_attn.q_proj.weight", (12 * 16, 48)),
        ("model.layers.3.self_attn.q_norm.weight", (8,)),
    ],
)
def test_a_tensor_of_the_wrong_shape_is_refused_by_its_name_on_disk(
    name: str, shape: tuple[int, ...], group6: Group6, tmp_path: Path
) -> None:
    text_only(group6, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors[name].shape != shape
    save_file(tensors | {name: torch.zeros(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(trivet.CheckpointError, match=name.replace(".", r"\.")):
        load(tmp_path)


def test_a_truncated_file_is_refused_by_its_name(group6: Group6, tmp_path: Path) -> None:
    path = text_only(group6, tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(trivet.CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)


def test_an_index_leads_past_the_shards_that_hold_only_what_is_not_served(group6: Group6, tmp_path: Path) -> None:
    """As published: several shards, vision and MTP tensors in some of them."""
    write_multimodal(group6.directory, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    unserved = set(unserved_tensors())
    shards = {
        "model-00001-of-00003.safetensors": [name for name in names[::2] if name not in unserved],
        "model-00002-of-00003.safetensors": [name for name in names[1::2] if name not in unserved],
        "model-00003-of-00003.safetensors": sorted(unserved),
    }
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with load(tmp_path) as runtime:
        assert_scores(runtime, group6.model, drawn(np.random.default_rng(4), 50), ATOL)


def test_decay_parameters_are_read_from_any_float_dtype_and_kept_in_float32(tmp_path: Path) -> None:
    """A checkpoint in bfloat16 throughout, served in float32: nothing but what the file rounded is lost."""
    model = make_qwen35(tmp_path, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with load(tmp_path, dtype="float32") as runtime:
        assert_scores(runtime, model, drawn(np.random.default_rng(5), 60), ATOL)


@pytest.mark.parametrize("form", ["text-only", "multimodal"])
def test_config_json_alone_serves_random_weights_that_remember_and_repeat(
    form: str, group6: Group6, tmp_path: Path
) -> None:
    if form == "multimodal":
        write_multimodal(group6.directory, tmp_path)
        (tmp_path / "model.safetensors").unlink()
    else:
        (tmp_path / "config.json").write_text((group6.directory / "config.json").read_text())
    prompt = drawn(np.random.default_rng(6), 60)
    scores = []
    for seed in (1, 1, 2):
        with load(tmp_path, weights="random", seed=seed) as runtime:
            scores.append(runtime.score(prompt))
            changed = runtime.score([(prompt[0] + 1) % 97, *prompt[1:]])
    assert scores[0] == scores[1] != scores[2]
    assert scores[2][-1].logprob != changed[-1].logprob, "the last position does not depend on the first token"
