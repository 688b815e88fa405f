"""Each point of Qwen3.5's arithmetic, got wrong: the comparison with transformers must notice every one.

The wrong variants replace one function, or one value of the loaded model, and leave the rest as it is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from tests.qwen35.conftest import Group6
from tests.support.oracle import assert_scores
from tests.support.positions import drawn
from torch import Tensor

import trivet
from trivet.geometry import AttentionGeometry
from trivet.layers.rotary import RotaryTable
from trivet.layers.rotary_layout import rotary_layout
from trivet.ops import gated_delta
from trivet.ops.rotary import fill_rotary_table
from trivet_qwen35 import delta_net

ATOL = 2e-3
TOKENS = 150
STEP_TOKENS = 41
"""Pieces end inside chunks, and a piece of one token decodes: every function of the layers has its turn."""


@pytest.fixture
def runtime(group6: Group6) -> Iterator[trivet.Runtime]:
    limits = trivet.Limits(max_requests=2, max_step_tokens=STEP_TOKENS, max_context=TOKENS, page_size=16)
    with trivet.Runtime.load(group6.directory, device="cpu", limits=limits, autostart=False) as runtime:
        yield runtime


def assert_noticed(runtime: trivet.Runtime, group6: Group6) -> None:
    with pytest.raises(AssertionError):
        assert_scores(runtime, group6.model, drawn(np.random.default_rng(1), TOKENS), ATOL)


def test_the_right_arithmetic_passes_the_comparison_that_the_wrong_ones_fail(
    runtime: trivet.Runtime, group6: Group6
) -> None:
    assert_scores(runtime, group6.model, drawn(np.random.default_rng(1), TOKENS), ATOL)


# The loaded model.


def layers_of(runtime: trivet.Runtime, kind: str) -> list[Any]:
    return [layer for layer in runtime._engine.model.layers if type(layer.mixer).__name__ == kind]  # type: ignore[attr-defined]


def split_queries_and_gates_in_halves(runtime: trivet.Runtime) -> None:
    """Read all queries, then all gates, where the rows lie head by head as [query, gate]."""
    for layer in layers_of(runtime, "Attention"):
        attention, weight = layer.mixer, layer.mixer.qkv.weight
        heads, width = attention.geometry.query_heads, attention.geometry.head_dim
        rows = weight[: 2 * heads * width]
        rows.copy_(rows.view(2, heads, width, -1).transpose(0, 1).reshape(rows.shape).clone())


def swap_query_and_gate(runtime: trivet.Runtime) -> None:
    for layer in layers_of(runtime, "Attention"):
        attention, weight = layer.mixer, layer.mixer.qkv.weight
        heads, width = attention.geometry.query_heads, attention.geometry.head_dim
        rows = weight[: 2 * heads * width]
        rows.copy_(rows.view(heads, 2, width, -1).flip(1).reshape(rows.shape).clone())


def plain_norm(place: str) -> Callable[[trivet.Runtime], None]:
    """Multiply by the weight where it is by 1 + weight: 1 + (weight - 1) does."""

    def change(runtime: trivet.Runtime) -> None:
        model: Any = runtime._engine.model
        norms = {
            "final": [model.norm],
            "mixer": [layer.mixer_norm for layer in model.layers],
            "mlp": [layer.mlp_norm for layer in model.layers],
            "query": [layer.mixer.q_norm for layer in layers_of(runtime, "Attention")],
            "key": [layer.mixer.k_norm for layer in layers_of(runtime, "Attention")],
        }[place]
        assert norms
        for norm in norms:
            norm.weight.sub_(1.0)

    return change


def rotate_the_whole_head(runtime: trivet.Runtime) -> None:
    engine = runtime._engine
    for attention, table in list(engine.rotary.items()):
        rope = attrs.evolve(attention.rope, rotary_dim=attention.head_dim)
        buffers = rotary_layout(rope, TOKENS).allocate("cpu")
        engine.rotary[attention] = RotaryTable(rope, buffers, table.dtype)


def spread_frequencies_over_the_whole_head(runtime: trivet.Runtime) -> None:
    for attention, table in runtime._engine.rotary.items():
        exponents = np.arange(0, attention.rope.rotary_dim, 2) / attention.head_dim
        frequencies = (attention.rope.theta**-exponents).astype(np.float32)
        fill_rotary_table(table.buffers["table"], frequencies, 1.0)


def round_to_bfloat16(name: str) -> Callable[[trivet.Runtime], None]:
    def change(runtime: trivet.Runtime) -> None:
        for layer in layers_of(runtime, "DeltaNet"):
            parameter = getattr(layer.mixer, name)
            parameter.copy_(parameter.bfloat16())

    return change


MODEL_CHANGES: dict[str, Callable[[trivet.Runtime], None]] = {
    "query and gate split in halves": split_queries_and_gates_in_halves,
    "gate before query": swap_query_and_gate,
    "plain final norm": plain_norm("final"),
    "plain mixer norm": plain_norm("mixer"),
    "plain MLP norm": plain_norm("mlp"),
    "plain query norm": plain_norm("query"),
    "plain key norm": plain_norm("key"),
    "rotary over the whole head": rotate_the_whole_head,
    "rotary frequencies over the whole head": spread_frequencies_over_the_whole_head,
    "A_log in bfloat16": round_to_bfloat16("a_log"),
    "dt_bias in bfloat16": round_to_bfloat16("dt_bias"),
}


@pytest.mark.parametrize("name", MODEL_CHANGES)
def test_a_wrong_convention_in_the_loaded_model_is_noticed(name: str, runtime: trivet.Runtime, group6: Group6) -> None:
    with torch.inference_mode():
        MODEL_CHANGES[name](runtime)
    assert_noticed(runtime, group6)


# The output gate of full attention.


@pytest.mark.parametrize(
    "gate", [torch.nn.functional.silu, lambda x: x.softmax(-1), lambda x: x.softmax(1), torch.tanh, torch.ones_like]
)
def test_an_output_gate_that_is_no_sigmoid_is_noticed(
    gate: Callable[[Tensor], Tensor], runtime: trivet.Runtime, group6: Group6, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet.layers.attention.torch", SimpleNamespace(**vars(torch) | {"sigmoid": gate}))
    assert_noticed(runtime, group6)


# The functions of the recurrent layers.

DELTA = ("gated_delta_prefill", "gated_delta_decode")
CONVOLUTION = ("causal_conv_prefill", "causal_conv_decode")


def test_tiled_key_heads_are_noticed(runtime: trivet.Runtime, group6: Group6, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value head i uses key head i // expansion, not i % key_heads."""
    for name in DELTA:
        right = getattr(delta_net, name)

        def wrong(query: Tensor, key: Tensor, value: Tensor, *rest: Any, right: Any = right, **more: Any) -> Any:
            expansion = value.shape[1] // key.shape[1]
            assert expansion > 1
            return right(query.repeat(1, expansion, 1), key.repeat(1, expansion, 1), value, *rest, **more)

        monkeypatch.setattr(delta_net, name, wrong)
    assert_noticed(runtime, group6)


def test_queries_and_keys_that_are_not_normalised_are_noticed(
    runtime: trivet.Runtime, group6: Group6, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are scaled by a constant instead, which keeps the state from overflowing."""
    monkeypatch.setattr(gated_delta, "_inverse_length", lambda vectors: torch.full_like(vectors[..., :1], 0.25))
    assert_noticed(runtime, group6)


def test_reads_that_are_not_scaled_by_the_key_dim_are_noticed(
    runtime: trivet.Runtime, group6: Group6, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gated norm after it undoes a scale but for its epsilon, so that the outputs are made that small."""
    for name in DELTA:
        right = getattr(delta_net, name)

        def wrong(*inputs: Any, right: Any = right, **more: Any) -> Any:
            out, state = right(*inputs, **more)
            return out * inputs[1].shape[-1] ** 0.5, state

        monkeypatch.setattr(delta_net, name, wrong)
    for layer in layers_of(runtime, "DeltaNet"):
        layer.mixer.eps = 1.0
    for layer in group6.model.model.layers:
        if hasattr(layer, "linear_attn"):
            monkeypatch.setattr(layer.linear_attn.norm, "variance_epsilon", 1.0)
    assert_noticed(runtime, group6)
    monkeypatch.setattr(delta_net, DELTA[0], gated_delta.gated_delta_prefill)
    monkeypatch.setattr(delta_net, DELTA[1], gated_delta.gated_delta_decode)
    assert_scores(runtime, group6.model, drawn(np.random.default_rng(1), TOKENS), ATOL)


@pytest.mark.parametrize("lost", ["rounded to bfloat16", "dropped between pieces"])
def test_a_recurrent_state_that_loses_something_between_pieces_is_noticed(
    lost: str, runtime: trivet.Runtime, group6: Group6, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in DELTA:
        right = getattr(delta_net, name)

        def wrong(*inputs: Any, right: Any = right, **more: Any) -> Any:
            out, state = right(*inputs, **more)
            return out, state.bfloat16().float() if lost == "rounded to bfloat16" else torch.zeros_like(state)

        monkeypatch.setattr(delta_net, name, wrong)
    assert_noticed(runtime, group6)


@pytest.mark.parametrize("lost", ["all of it", "the oldest entry"])
def test_a_convolution_tail_dropped_between_pieces_is_noticed(
    lost: str, runtime: trivet.Runtime, group6: Group6, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CONVOLUTION:
        right = getattr(delta_net, name)

        def wrong(x: Tensor, weight: Tensor, tail: Tensor, *rest: Any, right: Any = right) -> Any:
            kept = tail.clone()
            kept[..., : None if lost == "all of it" else 1] = 0.0
            return right(x, weight, kept, *rest)

        monkeypatch.setattr(delta_net, name, wrong)
    assert_noticed(runtime, group6)


@pytest.mark.parametrize("change", ["taps backwards", "no SiLU", "one token late"])
def test_a_wrong_convolution_is_noticed(
    change: str, runtime: trivet.Runtime, group6: Group6, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CONVOLUTION:
        right = getattr(delta_net, name)

        def wrong(x: Tensor, weight: Tensor, *rest: Any, right: Any = right) -> Any:
            if change == "taps backwards":
                weight = weight.flip(1)
            if change == "one token late":
                weight = weight.roll(-1, 1)
            out, tail = right(x, weight, *rest)
            return (torch.where(out > 0, out, 2 * out) if change == "no SiLU" else out), tail

        monkeypatch.setattr(delta_net, name, wrong)
    assert_noticed(runtime, group6)


@pytest.mark.parametrize("change", ["bfloat16", "no softplus", "no dt_bias", "A not exponentiated", "beta is 1"])
def test_a_wrong_decay_or_rate_is_noticed(
    change: str, runtime: trivet.Runtime, group6: Group6, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = delta_net.decay_and_beta

    def wrong(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        decay, beta = right(a, b, a_log, dt_bias)
        if change == "bfloat16":
            return decay.bfloat16().float(), beta
        if change == "no softplus":
            return -a_log.exp() * (a + dt_bias).relu(), beta
        if change == "no dt_bias":
            return right(a, b, a_log, torch.zeros_like(dt_bias))[0], beta
        if change == "A not exponentiated":
            return a_log * torch.nn.functional.softplus(a + dt_bias), beta
        return decay, torch.ones_like(beta)

    monkeypatch.setattr(delta_net, "decay_and_beta", wrong)
    assert_noticed(runtime, group6)


@pytest.mark.parametrize("change", ["zero-centred", "sigmoid gate", "gate before the norm", "no gate"])
def test_a_wrong_gated_norm_is_noticed(
    change: str, runtime: trivet.Runtime, group6: Group6, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = delta_net.gated_rms_norm

    def wrong(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        if change == "zero-centred":
            return right(x, gate, 1 + weight, eps)
        normed = right(x, torch.ones_like(gate), weight, eps) / torch.nn.functional.silu(torch.ones(()))
        if change == "sigmoid gate":
            return normed * torch.sigmoid(gate)
        if change == "no gate":
            return normed
        gated = x * torch.nn.functional.silu(gate)
        return right(gated, torch.ones_like(gate), weight, eps) / torch.nn.functional.silu(torch.ones(()))

    monkeypatch.setattr(delta_net, "gated_rms_norm", wrong)
    assert_noticed(runtime, group6)


def test_the_fixture_has_what_the_wrong_variants_need(runtime: trivet.Runtime) -> None:
    geometry = runtime._engine.blueprint.geometry
    recurrent = geometry.layers[geometry.recurrent_layers[0]]
    (attention,) = geometry.attention_geometries
    assert isinstance(attention, AttentionGeometry) and attention.group_size == 6
    assert recurrent.key_heads > 1 and recurrent.value_heads > recurrent.key_heads  # type: ignore[union-attr]
    assert attention.rope.rotary_dim < attention.head_dim
