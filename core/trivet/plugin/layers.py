"""The shared layers and tensor operations for authors of model families. Imports torch.

Import this from the module that builds the model, not from the one that describes the family.
"""

from trivet.layers.attention import Attention
from trivet.layers.context import StepContext
from trivet.layers.decoder import Decoder, DecoderModel, Layer
from trivet.layers.linear import Linear
from trivet.layers.mlp import GatedMlp
from trivet.layers.norm import RmsNorm
from trivet.layers.parameters import Parameters
from trivet.ops.activation import silu_and_mul
from trivet.ops.norm import rms_norm
from trivet.ops.rotary import apply_rotary

__all__ = [
    "Attention",
    "Decoder",
    "DecoderModel",
    "GatedMlp",
    "Layer",
    "Linear",
    "Parameters",
    "RmsNorm",
    "StepContext",
    "apply_rotary",
    "rms_norm",
    "silu_and_mul",
]
