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
from trivet.ops.convolution import causal_conv_decode, causal_conv_prefill
from trivet.ops.gated_delta import decay_and_beta, gated_delta_decode, gated_delta_prefill
from trivet.ops.norm import gated_rms_norm, rms_norm
from trivet.ops.packed import PackedRows
from trivet.ops.rotary import apply_rotary, apply_rotary_

__all__ = [
    # layers
    "Attention",
    "Decoder",
    "DecoderModel",
    "GatedMlp",
    "Layer",
    "Linear",
    "Parameters",
    "RmsNorm",
    "StepContext",
    # tensor operations
    "PackedRows",
    "apply_rotary",
    "apply_rotary_",
    "causal_conv_decode",
    "causal_conv_prefill",
    "decay_and_beta",
    "gated_delta_decode",
    "gated_delta_prefill",
    "gated_rms_norm",
    "rms_norm",
    "silu_and_mul",
]
