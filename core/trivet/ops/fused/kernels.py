"""All fused kernels by name, for `trivet.ops.dispatch`. Importing this imports Triton."""

from trivet.ops.fused.activation import silu_and_mul
from trivet.ops.fused.delta_chunks import chunks_serve, delta_chunks
from trivet.ops.fused.delta_decode import decode_serves, delta_decode
from trivet.ops.fused.device import device_table
from trivet.ops.fused.gated_norm import gated_rms_norm
from trivet.ops.fused.heads import norm_rotate_append
from trivet.ops.fused.matmul import SmallBatchMatmul
from trivet.ops.fused.norm import rms_norm
from trivet.ops.fused.output_gate import output_gate
from trivet.ops.fused.pinned import PinnedMatmul

__all__ = [
    "PinnedMatmul",
    "SmallBatchMatmul",
    "chunks_serve",
    "decode_serves",
    "delta_chunks",
    "delta_decode",
    "device_table",
    "gated_rms_norm",
    "norm_rotate_append",
    "output_gate",
    "rms_norm",
    "silu_and_mul",
]
