# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Root-mean-square norm in one kernel."""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trivet.launch import lean
from trivet.ops.fused.device import dependent_launch

NARROW = 1024
"""Elements that rows of fewer are taken together to, so that a program has work."""


@lean
@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x,
    weight,
    out,
    rows,
    width,
    x_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row64 = row.to(tl.int64)[:, None]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row64 * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(values * values, 1) / width
    normed = values * tl.rsqrt(mean_square + eps)[:, None]
    dtype = out.dtype.element_ty
    if ZERO_CENTRED:
        normed += normed * scale
    else:
        normed = normed.to(dtype).to(tl.float32) * scale
    tl.store(out + row64 * width + column[None, :], normed.to(dtype), mask=inside)


@cache
def _program(width: int) -> tuple[int, int, int]:
    """Rows of a program, elements that it takes of each, and its warps."""
    block = triton.next_power_of_2(width)
    return max(1, NARROW // block), block, min(16, max(4, block // 1024))


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False, *, dependent: bool | None = None
) -> Tensor:
    """`trivet.ops.norm.rms_norm`, rounded where that rounds, of rows with one weight.

    Args:
        x: ``[rows, width]``, the last dimension contiguous.
        weight: ``[width]``, contiguous.
        eps, zero_centred: as there.
        dependent: start while the kernel before drains (programmatic dependent launch); None: as the device's
            table says.

    Returns:
        A new contiguous tensor.
    """
    rows, width = x.shape
    out = x.new_empty((rows, width))
    if rows == 0:
        return out
    together, block, warps = _program(width)
    if dependent is None:
        dependent = dependent_launch(x.get_device())
    _rms_norm_kernel[(-(-rows // together),)](
        x, weight, out, rows, width, x.stride(0), eps, together, block, zero_centred, dependent,
        num_warps=warps, launch_pdl=dependent,
    )  # fmt: skip
    return out
