"""Qwen3's layers (arXiv 2505.09388): pre-norm attention with normed heads, then a gated MLP."""

from __future__ import annotations

from torch import Tensor

from trivet.plugin import AttentionGeometry, ModelGeometry
from trivet.plugin.layers import Attention, Decoder, GatedMlp, Parameters, RmsNorm, StepContext


class Qwen3Layer:
    """One decoder layer."""

    def __init__(self, index: int, attention: AttentionGeometry, eps: float, parameters: Parameters) -> None:
        self.index = index
        self.attention_norm = RmsNorm(parameters.below("attention_norm"), eps)
        self.attention = Attention(index, attention, parameters.below("attention"), qk_norm_eps=eps)
        self.mlp_norm = RmsNorm(parameters.below("mlp_norm"), eps)
        self.mlp = GatedMlp(parameters.below("mlp"))

    def __call__(self, hidden: Tensor, step: StepContext) -> Tensor:
        """``hidden [tokens, hidden_size]`` through attention and MLP, each added to `hidden` in place.

        The last layer returns ``[outputs, hidden_size]`` where not all tokens are wanted.
        """
        hidden = step.wanted(self.index, self.attention(self.attention_norm(hidden), step, residual=hidden))
        return self.mlp(self.mlp_norm(hidden), residual=hidden)


def build(geometry: ModelGeometry, parameters: Parameters) -> Decoder:
    """The model over its loaded parameters."""
    layers = []
    for index, layer in enumerate(geometry.layers):
        assert isinstance(layer, AttentionGeometry)
        layers.append(Qwen3Layer(index, layer, geometry.norm_eps, parameters.below(f"layers.{index}")))
    return Decoder(parameters, layers, norm=RmsNorm(parameters.below("norm"), geometry.norm_eps))
