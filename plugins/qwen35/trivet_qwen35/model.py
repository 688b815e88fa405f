"""Qwen3.5's layers: a mixer, recurrent or attention, then a gated MLP, each behind a zero-centred norm."""

from __future__ import annotations

from torch import Tensor

from trivet.plugin import AttentionGeometry, LayerGeometry
from trivet.plugin.layers import Attention, Decoder, GatedMlp, Parameters, RmsNorm, StepContext
from trivet_qwen35.config import Qwen35Geometry
from trivet_qwen35.delta_net import DeltaNet


class Qwen35Layer:
    """One decoder layer."""

    def __init__(self, index: int, layer: LayerGeometry, eps: float, parameters: Parameters) -> None:
        self.index = index
        self.mixer_norm = RmsNorm(parameters.below("mixer_norm"), eps, zero_centred=True)
        self.mixer: Attention | DeltaNet
        if isinstance(layer, AttentionGeometry):
            self.mixer = Attention(
                index,
                layer,
                parameters.below("attention"),
                qk_norm_eps=eps,
                zero_centred_norm=True,
                output_gate=True,
            )
        else:
            self.mixer = DeltaNet(index, layer, eps, parameters.below("delta_net"))
        self.mlp_norm = RmsNorm(parameters.below("mlp_norm"), eps, zero_centred=True)
        self.mlp = GatedMlp(parameters.below("mlp"))

    def __call__(self, hidden: Tensor, step: StepContext) -> Tensor:
        """``hidden [tokens, hidden_size]`` through mixer and MLP, each added to `hidden` in place.

        The last layer returns ``[outputs, hidden_size]`` where not all tokens are wanted.
        """
        hidden = step.wanted(self.index, self.mixer(self.mixer_norm(hidden), step, residual=hidden))
        return self.mlp(self.mlp_norm(hidden), residual=hidden)


def build(geometry: Qwen35Geometry, parameters: Parameters) -> Decoder:
    """The model over its loaded parameters."""
    eps = geometry.norm_eps
    layers = [
        Qwen35Layer(index, layer, eps, parameters.below(f"layers.{index}"))
        for index, layer in enumerate(geometry.layers)
    ]
    return Decoder(parameters, layers, norm=RmsNorm(parameters.below("norm"), eps, zero_centred=True))
