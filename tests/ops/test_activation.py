"""The gated activation agrees with transformers' MLP."""

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from trivet.ops import silu_and_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_comes_first(dtype: torch.dtype) -> None:
    module = Qwen3MLP(Qwen3Config(hidden_size=16, intermediate_size=24)).to(dtype)
    module.down_proj = torch.nn.Identity()
    hidden = torch.randn(5, 16).to(dtype)
    with torch.no_grad():
        gate_up = torch.cat((module.gate_proj(hidden), module.up_proj(hidden)), dim=-1)
        ours, theirs = silu_and_mul(gate_up), module(hidden)
    assert ours.is_contiguous()
    assert ours.dtype is dtype
    torch.testing.assert_close(ours, theirs, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=1e-7)


def test_the_projections_are_left_alone() -> None:
    gate_up = torch.randn(3, 8)
    before = gate_up.clone()
    silu_and_mul(gate_up)
    assert torch.equal(gate_up, before)
