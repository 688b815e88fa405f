"""Torch functions that layers are made of: norms, rotary embedding, activation, convolution, gated delta rule."""

from trivet.ops.activation import silu_and_mul
from trivet.ops.convolution import causal_conv_decode, causal_conv_prefill
from trivet.ops.gated_delta import decay_and_beta, gated_delta_decode, gated_delta_prefill
from trivet.ops.norm import gated_rms_norm, rms_norm
from trivet.ops.packed import PackedRows
from trivet.ops.rotary import (
    apply_rotary,
    apply_rotary_,
    fill_rotary_table,
    rotary_rows,
)

__all__ = [
    "PackedRows",
    "apply_rotary",
    "apply_rotary_",
    "causal_conv_decode",
    "causal_conv_prefill",
    "decay_and_beta",
    "fill_rotary_table",
    "gated_delta_decode",
    "gated_delta_prefill",
    "gated_rms_norm",
    "rms_norm",
    "rotary_rows",
    "silu_and_mul",
]
