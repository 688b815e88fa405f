# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The output norm of Gated DeltaNet layers, with its gate, in one kernel."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trivet.launch import lean
from trivet.ops.fused.device import dependent_launch

TOGETHER = 1024
"""Elements that heads are taken together to, so that a program has work."""


@lean
@triton.jit(do_not_specialize=["vectors"], do_not_specialize_on_alignment=["slots"])
def _gated_rms_norm_kernel(
    x,
    gate,
    weight,
    out,
    slots,
    vectors,
    gate_stride,
    live_slots,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_SLOT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    column = tl.arange(0, BLOCK)
    inside = (vector < vectors)[:, None] & (column < WIDTH)[None, :]
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    gate_at = gate + (vector // HEADS * gate_stride + vector % HEADS * WIDTH)[:, None] + column[None, :]
    there = inside
    if BY_SLOT:
        there &= (tl.load(slots + vector // HEADS, mask=vector < vectors, other=0) < live_slots)[:, None]
    at = vector[:, None] * WIDTH + column[None, :]
    dtype = out.dtype.element_ty
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    opened = tl.load(gate_at, mask=there, other=0.0).to(tl.float32)
    opened = opened / (1.0 + tl.exp(-opened))
    mean_square = tl.sum(values * values, 1) / WIDTH
    normed = (values * tl.rsqrt(mean_square + eps)[:, None]).to(dtype).to(tl.float32)
    normed = (normed * scale).to(dtype).to(tl.float32)
    tl.store(out + at, (opened * normed).to(dtype), mask=inside)


@cache
def _program(width: int) -> tuple[int, int]:
    """Heads of a program, and elements that it takes of each."""
    block = triton.next_power_of_2(width)
    return max(1, TOGETHER // block), block


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    slots: Tensor | None = None,
    live_slots: int = 0,
    dependent: bool | None = None,
) -> Tensor:
    """`trivet.ops.norm.gated_rms_norm`, rounded where that rounds.

    Args:
        x: ``[tokens, heads, width]``, contiguous.
        gate: the same shape, each token's heads contiguous.
        weight: ``[width]``, contiguous.
        eps: added to the mean square.
        out: as `x`, where the result goes; it may be `x` itself. None: a new tensor.
        slots: int64 ``[tokens]``; tokens whose slot is not below `live_slots` give zeros. None: no token does.
        live_slots: see `slots`.
        dependent: as in `trivet.ops.fused.norm.rms_norm`.

    Returns:
        The result, ``[tokens, heads, width]``.
    """
    tokens, heads, width = x.shape
    if out is None:
        out = torch.empty_like(x)
    if tokens == 0:
        return out
    if dependent is None:
        dependent = dependent_launch(x.get_device())
    vectors, block = _program(width)
    _gated_rms_norm_kernel[(-(-tokens * heads // vectors),)](
        x, gate, weight, out, slots, tokens * heads, gate.stride(0), live_slots, eps, heads, width, vectors, block,
        slots is not None, dependent, num_warps=4, launch_pdl=dependent,
    )  # fmt: skip
    return out
