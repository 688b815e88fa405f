"""Norms agree with transformers' modules, in the convention that each weight is stored in."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from trivet.ops import gated_rms_norm, rms_norm

EPS = 1e-6


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def oracle(module: torch.nn.Module, weight: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        module.weight = torch.nn.Parameter(weight.clone())
        return module(*inputs)


@pytest.mark.parametrize("shape", [(1, 64), (5, 3, 32)])
def test_plain_norm_is_qwen3s(shape: tuple[int, ...]) -> None:
    x, weight = draw(*shape), draw(shape[-1])
    torch.testing.assert_close(
        rms_norm(x, weight, EPS), oracle(Qwen3RMSNorm(shape[-1], EPS), weight, x), rtol=2e-6, atol=1e-6
    )


@pytest.mark.parametrize("shape", [(1, 64), (5, 3, 32)])
def test_zero_centred_norm_is_qwen35s(shape: tuple[int, ...]) -> None:
    x, weight = draw(*shape), draw(shape[-1])
    torch.testing.assert_close(
        rms_norm(x, weight, EPS, zero_centred=True),
        oracle(Qwen3_5RMSNorm(shape[-1], EPS), weight, x),
        rtol=2e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_half_precision_is_rounded_where_transformers_rounds(dtype: torch.dtype, zero_centred: bool) -> None:
    # Rounding once instead of twice (or the reverse) moves a fifth of the entries to the next number.
    x, weight = draw(64, 128, dtype=dtype), draw(128, dtype=dtype)
    module = (Qwen3_5RMSNorm if zero_centred else Qwen3RMSNorm)(128, EPS)
    ours, theirs = rms_norm(x, weight, EPS, zero_centred), oracle(module, weight, x)
    assert ours.dtype is dtype
    assert (ours != theirs).float().mean() < 0.005


def test_eps_bounds_the_norm_of_small_inputs() -> None:
    x, weight = 1e-4 * draw(4, 32), draw(32)
    for eps in (1e-6, 1e-2):
        expected = oracle(Qwen3RMSNorm(32, eps), weight, x)
        torch.testing.assert_close(rms_norm(x, weight, eps), expected, rtol=2e-6, atol=1e-9)


def test_one_call_norms_query_and_key_heads_with_their_own_weights() -> None:
    heads, query_weight, key_weight = draw(7, 6, 16), draw(16), draw(16)
    weight = torch.cat((query_weight.expand(4, 16), key_weight.expand(2, 16)))
    joint = rms_norm(heads, weight, EPS)
    assert torch.equal(joint[:, :4], rms_norm(heads[:, :4], query_weight, EPS))
    assert torch.equal(joint[:, 4:], rms_norm(heads[:, 4:], key_weight, EPS))


@pytest.mark.parametrize("zero_centred", [False, True])
def test_norms_leave_their_inputs_alone(zero_centred: bool) -> None:
    x, gate, weight = draw(3, 8), draw(3, 8), draw(8)
    before = [tensor.clone() for tensor in (x, gate, weight)]
    rms_norm(x, weight, EPS, zero_centred)
    gated_rms_norm(x, gate, weight, EPS)
    assert all(map(torch.equal, (x, gate, weight), before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm_is_qwen35s(dtype: torch.dtype) -> None:
    x, gate = draw(5, 4, 32, dtype=dtype), draw(5, 4, 32, dtype=dtype)
    weight = draw(32, dtype=dtype)
    ours, theirs = gated_rms_norm(x, gate, weight, EPS), oracle(Qwen3_5RMSNormGated(32, EPS), weight, x, gate)
    assert ours.dtype is dtype
    torch.testing.assert_close(ours, theirs, rtol=2e-6 if dtype is torch.float32 else 1e-2, atol=1e-6)


def test_double_precision_is_kept() -> None:
    x, weight = draw(3, 16).double(), draw(16).double()
    expected = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + weight)
    torch.testing.assert_close(rms_norm(x, weight, EPS, zero_centred=True), expected, rtol=1e-13, atol=1e-13)
