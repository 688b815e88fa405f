"""Where the fused kernels are used: on CUDA tensors of the half-precision dtypes, if Triton is installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trivet.ops.fused.matmul import SmallBatchMatmul

FUSED_DTYPES = (torch.bfloat16, torch.float16)


@cache
def _kernels() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from trivet.ops.fused import kernels

    return kernels


def fused_kernels(x: Tensor) -> ModuleType | None:
    """The module `trivet.ops.fused.kernels` if it serves tensors like `x`; None: the torch operations do.

    The kernels cannot be differentiated through.
    """
    return _kernels() if x.is_cuda and x.dtype in FUSED_DTYPES and not x.requires_grad else None


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
