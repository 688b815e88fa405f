"""Where the fused kernels are used: on CUDA tensors of the half-precision dtypes, if Triton can be used."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trivet.capacity.fused import FUSED_DTYPES
from trivet.errors import ConfigError
from trivet.installed import missing_triton

if TYPE_CHECKING:
    from trivet.ops.fused.matmul import SmallBatchMatmul
    from trivet.ops.fused.pinned import PinnedMatmul

FUSED_TORCH_DTYPES = tuple(getattr(torch, name) for name in FUSED_DTYPES)


@cache
def _kernels() -> ModuleType | None:
    if missing_triton() is not None:
        return None
    from trivet.ops.fused import kernels

    return kernels


def fused_kernels(x: Tensor) -> ModuleType | None:
    """The module `trivet.ops.fused.kernels` if it serves tensors like `x`; None: the torch operations do.

    The kernels cannot be differentiated through.
    """
    return _kernels() if x.is_cuda and x.dtype in FUSED_TORCH_DTYPES and not x.requires_grad else None


def small_batch_matmul(weight: Tensor, *, gated: bool = False) -> SmallBatchMatmul | None:
    """Products of few rows with ``weight [outputs, inner]``; None where torch makes all of them.

    Args:
        gated: the halves of `weight` are the gate and up rows of a gated MLP, and products are ``silu(gate) * up``.
    """
    kernels = fused_kernels(weight)
    if kernels is None:
        return None
    product: SmallBatchMatmul = kernels.SmallBatchMatmul(weight, kernels.device_table(weight.device), gated=gated)
    return product if product else None


def pinned_matmul(weight: Tensor) -> PinnedMatmul:
    """Products with ``weight [outputs, inner]`` whose rows do not depend on each other, by a single bit.

    Raises:
        ConfigError: there are none for such a weight; torch chooses the order of its sums by the number of rows.
    """
    kernels = fused_kernels(weight)
    if kernels is None or not weight.is_contiguous():
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ConfigError(
            f"numeric_policy='pinned': no matrix product here keeps rows independent of each other for a "
            f"{'' if weight.is_contiguous() else 'strided '}weight in {dtype} on {weight.device}; expected contiguous "
            "bfloat16 or float16 on a CUDA device where Triton works; use numeric_policy='tuned'"
        )
    product: PinnedMatmul = kernels.PinnedMatmul(weight, dependent=kernels.device_table(weight.device).dependent_launch)
    return product
