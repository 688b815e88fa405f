# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Root-mean-square norm in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trivet.ops.fused.device import device_table

NARROW = 1024
"""Elements that rows of fewer are taken together to, so that a program has work."""


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
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    block = triton.next_power_of_2(width)
    together = max(1, NARROW // block)
    if dependent is None:
        dependent = device_table(x.device).dependent_launch
    _rms_norm_kernel[(-(-rows // together),)](
        x, weight, out, rows, width, x.stride(0), eps, together, block, zero_centred, dependent,
        num_warps=min(16, max(4, block // 512)), launch_pdl=dependent,
    )  # fmt: skip
    return out
