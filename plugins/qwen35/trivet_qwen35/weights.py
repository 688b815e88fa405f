"""Qwen3.5's parameters and the tensors on disk that fill them."""

from __future__ import annotations

from trivet.plugin import (
    AttentionGeometry,
    Initial,
    ParameterSpec,
    Part,
    RecurrentGeometry,
    WeightMap,
    standard_weights,
)
from trivet_qwen35.config import MULTIMODAL, Qwen35Geometry

IGNORED = ("model.visual.*", "mtp.*", "*.rotary_emb.inv_freq")
"""The vision tower and the multi-token-prediction layers of published checkpoints, which are not served."""


def weight_map(geometry: Qwen35Geometry) -> WeightMap:
    """Names on disk are those of published checkpoints, and of transformers' ``Qwen3_5ForCausalLM``."""
    root = "model.language_model." if geometry.model_type == MULTIMODAL else "model."
    hidden, centre = geometry.hidden_size, 0.0  # norm weights are zero-centred
    parameters = [*standard_weights.embeddings(root, geometry.vocab_size, hidden, tied=geometry.tied_embeddings)]
    for index, layer in enumerate(geometry.layers):
        name, disk = f"layers.{index}", f"{root}layers.{index}"
        mixer_norm = f"{disk}.input_layernorm.weight"
        parameters.append(standard_weights.norm(f"{name}.mixer_norm.weight", mixer_norm, hidden, centre=centre))
        if isinstance(layer, AttentionGeometry):
            parameters += standard_weights.attention(
                f"{name}.attention",
                f"{disk}.self_attn",
                layer,
                hidden,
                bias=geometry.attention_bias,
                output_bias=geometry.attention_bias,
                qk_norm=True,
                output_gate=True,
                norm_centre=centre,
            )
        else:
            parameters += _delta_net(f"{name}.delta_net", f"{disk}.linear_attn", layer, hidden)
        mlp_norm = f"{disk}.post_attention_layernorm.weight"
        parameters.append(standard_weights.norm(f"{name}.mlp_norm.weight", mlp_norm, hidden, centre=centre))
        parameters += standard_weights.gated_mlp(f"{name}.mlp", f"{disk}.mlp", hidden, geometry.intermediate_size)
    parameters.append(standard_weights.norm("norm.weight", f"{root}norm.weight", hidden, centre=centre))
    ignored = (*IGNORED, "lm_head.weight") if geometry.tied_embeddings else IGNORED
    return WeightMap(tuple(parameters), ignored=ignored)


def _delta_net(name: str, disk: str, layer: RecurrentGeometry, hidden_size: int) -> tuple[ParameterSpec, ...]:
    """The four input projections as one matrix; decay parameters in float32, whatever is served."""
    projections = (
        (f"{disk}.in_proj_qkv.weight", layer.conv_channels),
        (f"{disk}.in_proj_z.weight", layer.value_elements),
        (f"{disk}.in_proj_b.weight", layer.value_heads),
        (f"{disk}.in_proj_a.weight", layer.value_heads),
    )
    heads, channels, taps = layer.value_heads, layer.conv_channels, layer.conv_kernel
    return (
        standard_weights.stacked(f"{name}.in.weight", projections, hidden_size),
        ParameterSpec(
            f"{name}.conv.weight",
            (channels, taps),
            (Part(f"{disk}.conv1d.weight", (channels, 1, taps)),),
            initial=Initial.normal(taps**-0.5),
        ),
        ParameterSpec(
            f"{name}.a_log", (heads,), (Part(f"{disk}.A_log", (heads,)),), "float32", Initial.log_uniform(0.001, 0.05)
        ),
        ParameterSpec(
            f"{name}.dt_bias", (heads,), (Part(f"{disk}.dt_bias", (heads,)),), "float32", Initial.uniform(-1.0, 0.0)
        ),
        standard_weights.norm(f"{name}.norm.weight", f"{disk}.norm.weight", layer.value_dim),
        standard_weights.matrix(f"{name}.out.weight", f"{disk}.out_proj.weight", hidden_size, layer.value_elements),
    )
