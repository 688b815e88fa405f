"""A published geometry is found by name: its sizes are those of transformers, and weights are what it lacks."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import trivet
from trivet.runtime.locate import GEOMETRIES, locate_checkpoint

PARAMETERS = {
    "qwen3-0.6b": 0.596e9,
    "qwen3-4b": 4.022e9,
    "qwen3-14b": 14.768e9,
    "qwen3.5-4b": 4.206e9,
    "qwen3.5-27b": 26.896e9,
}
"""As published, without the vision tower and the multi-token-prediction layers."""


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_planned_weights_are_those_that_transformers_builds(name: str) -> None:
    config = AutoConfig.from_pretrained(locate_checkpoint(name)).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    elements = {key: tensor.numel() for key, tensor in model.named_parameters()}
    float32 = sum(count for key, count in elements.items() if key.endswith(("A_log", "dt_bias")))
    limits = trivet.Limits(max_requests=1, max_step_tokens=64, max_context=64, page_size=16)
    ledger = trivet.plan_memory(name, "h200", limits=limits, attention="reference")
    assert ledger.line("weights").bytes == 2 * sum(elements.values()) + 2 * float32
    assert sum(elements.values()) == pytest.approx(PARAMETERS[name], rel=1e-3)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_loading_a_geometry_with_its_weights_says_that_it_has_none(name: str) -> None:
    with pytest.raises(trivet.ConfigError, match=rf"'{name}' is a geometry.*weights='random'"):
        trivet.Runtime.load(name, device="cpu")
