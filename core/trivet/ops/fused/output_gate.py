# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The output gate of attention layers in one kernel."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trivet.launch import lean
from trivet.ops.fused.device import dependent_launch

BLOCK = 1024
"""Elements of a token that a program takes, 16 bytes a thread."""


@lean
@triton.jit
def _output_gate_kernel(
    attended,
    gates,
    gate_stride,
    gate_head_stride,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program ``(token, elements)``."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = attended + token * WIDTH + column
    gate_at = gates + token * gate_stride + (column // HEAD_DIM * gate_head_stride + column % HEAD_DIM)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    dtype = attended.dtype.element_ty
    opened = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(at, (values * opened).to(dtype), mask=inside)


def output_gate(attended: Tensor, gates: Tensor, *, dependent: bool | None = None) -> Tensor:
    """``attended * sigmoid(gates)`` in place, rounded where torch rounds: the sigmoid, then the product.

    Args:
        attended: ``[tokens, heads, head_dim]``, contiguous. Changed.
        gates: the same shape and dtype, the last dimension contiguous.
        dependent: as in `trivet.ops.fused.norm.rms_norm`.

    Returns:
        `attended`.
    """
    tokens, heads, head_dim = attended.shape
    if tokens == 0:
        return attended
    if dependent is None:
        dependent = dependent_launch(attended.get_device())
    width = heads * head_dim
    _output_gate_kernel[(tokens, -(-width // BLOCK))](
        attended, gates, gates.stride(0), gates.stride(1), width, head_dim, BLOCK, dependent, launch_pdl=dependent
    )
    return attended
