"""Qwen3's parameters and the tensors on disk that fill them."""

from __future__ import annotations

from trivet.plugin import AttentionGeometry, ModelGeometry, WeightMap, standard_weights
from trivet_qwen3.config import Qwen3Geometry


def weight_map(geometry: ModelGeometry) -> WeightMap:
    """Names on disk are those of transformers' ``Qwen3ForCausalLM``."""
    assert isinstance(geometry, Qwen3Geometry)
    hidden = geometry.hidden_size
    parameters = [*standard_weights.embeddings("model.", geometry.vocab_size, hidden, tied=geometry.tied_embeddings)]
    for index, layer in enumerate(geometry.layers):
        assert isinstance(layer, AttentionGeometry)
        name, disk, bias = f"layers.{index}", f"model.layers.{index}", geometry.attention_bias
        parameters += [
            standard_weights.norm(f"{name}.attention_norm.weight", f"{disk}.input_layernorm.weight", hidden),
            *standard_weights.attention(
                f"{name}.attention", f"{disk}.self_attn", layer, hidden, bias=bias, output_bias=bias, qk_norm=True
            ),
            standard_weights.norm(f"{name}.mlp_norm.weight", f"{disk}.post_attention_layernorm.weight", hidden),
            *standard_weights.gated_mlp(f"{name}.mlp", f"{disk}.mlp", hidden, geometry.intermediate_size),
        ]
    parameters.append(standard_weights.norm("norm.weight", "model.norm.weight", hidden))
    ignored = ("lm_head.weight",) if geometry.tied_embeddings else ()
    return WeightMap(tuple(parameters), ignored=(*ignored, "*.rotary_emb.inv_freq"))
