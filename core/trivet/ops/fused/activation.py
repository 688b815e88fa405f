# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The activation of gated MLPs in one kernel."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trivet.launch import lean
from trivet.ops.fused.device import dependent_launch

BLOCK = 1024


@lean
@triton.jit
def _silu_and_mul_kernel(
    gate_up,
    out,
    width,
    stride,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = gate_up + row * stride + column
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if EVEN:
        gate = tl.load(at).to(tl.float32)
        up = tl.load(at + width).to(tl.float32)
    else:
        gate = tl.load(at, mask=column < width, other=0.0).to(tl.float32)
        up = tl.load(at + width, mask=column < width, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    opened = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    product = (opened * up).to(dtype)
    if EVEN:
        tl.store(out + row * width + column, product)
    else:
        tl.store(out + row * width + column, product, mask=column < width)


def silu_and_mul(gate_up: Tensor, *, dependent: bool | None = None) -> Tensor:
    """`trivet.ops.activation.silu_and_mul`, rounded where that rounds.

    Args:
        gate_up: ``[tokens, 2 * intermediate]``, gate first, the last dimension contiguous.
        dependent: as in `trivet.ops.fused.norm.rms_norm`.

    Returns:
        A new contiguous tensor ``[tokens, intermediate]``.
    """
    tokens, width = gate_up.shape
    width //= 2
    out = gate_up.new_empty((tokens, width))
    if tokens == 0:
        return out
    if dependent is None:
        dependent = dependent_launch(gate_up.get_device())
    _silu_and_mul_kernel[(tokens, -(-width // BLOCK))](
        gate_up, out, width, gate_up.stride(0), BLOCK, width % BLOCK == 0, dependent, launch_pdl=dependent
    )
    return out
