"""Root-mean-square norms (Zhang & Sennrich 2019, arXiv 1910.07467) in the three forms that Qwen models use."""

import torch
import torch.nn.functional as F
from torch import Tensor

from trivet.ops.dispatch import fused_kernels
from trivet.ops.precision import accumulation_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
    """Divide `x` by the root of its mean square over the last dimension, and scale by `weight`.

    The two conventions differ in what is stored and in where the result is rounded:

    - plain (Qwen3): rounded to the dtype of `x`, then multiplied by `weight`;
    - zero-centred (Qwen3.5): multiplied by ``1 + weight`` in float32, then rounded.

    Args:
        x: ``[..., width]``, any float dtype, any strides.
        weight: ``[width]``, or anything that broadcasts against `x` without enlarging it: with
            ``[heads, width]`` one call norms query and key heads that lie side by side.
        eps: added to the mean square (``rms_norm_eps``).
        zero_centred: which convention `weight` is stored in.

    Returns:
        A new tensor with the shape and dtype of `x`.
    """
    kernels = fused_kernels(x)
    if kernels is not None and weight.dim() == 1 and (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)):
        normed: Tensor = kernels.rms_norm(x.view(-1, x.shape[-1]), weight.contiguous(), eps, zero_centred)
        return normed.view(x.shape)
    normed = _unit_mean_square(x, eps)
    if zero_centred:
        return normed.addcmul_(normed, weight.to(normed.dtype)).to(x.dtype)
    return normed.to(x.dtype).mul_(weight)


def query_key_rms_norm(
    heads: Tensor, query_weight: Tensor, key_weight: Tensor, query_heads: int, eps: float, zero_centred: bool = False
) -> Tensor:
    """`rms_norm` of query and key heads that lie side by side, each sort with its own weight, in one pass.

    Args:
        heads: ``[tokens, heads, head_dim]``, query heads first, any strides.
        query_weight, key_weight: ``[head_dim]``.
        query_heads: how many of the heads are query heads.
        eps, zero_centred: as in `rms_norm`.

    Returns:
        A new tensor with the shape and dtype of `heads`.
    """
    normed = _unit_mean_square(heads, eps)
    if not zero_centred:
        normed = normed.to(heads.dtype)
    for part, weight in zip(normed.tensor_split((query_heads,), 1), (query_weight, key_weight), strict=True):
        if zero_centred:
            part.addcmul_(part, weight.to(part.dtype))
        else:
            part.mul_(weight)
    return normed.to(heads.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain norm of `x`, times ``silu(gate)`` taken in float32: the output norm of a Gated DeltaNet layer.

    Args:
        x: ``[..., width]``.
        gate: the same shape as `x`.
        weight: ``[width]``, not zero-centred, in families whose other norms are too.
        eps: added to the mean square.

    Returns:
        A new tensor with the shape and dtype of `x`.
    """
    kernels = fused_kernels(x)
    if kernels is not None and x.dim() == 3 and x.is_contiguous() and gate.stride()[1:] == x.stride()[1:]:
        fused: Tensor = kernels.gated_rms_norm(x, gate, weight.contiguous(), eps)
        return fused
    normed = rms_norm(x, weight, eps)
    opened = F.silu(gate.to(accumulation_dtype(x.dtype)))
    # In the wider dtype first, so that the product is rounded once.
    return opened.mul_(normed).to(x.dtype)


def _unit_mean_square(x: Tensor, eps: float) -> Tensor:
    """`x` over the root of its mean square, in the accumulation dtype, as a new tensor.

    A decode step on a CPU costs what its operations cost to launch; these are fewer than torch.rms_norm is
    composed of there, and one of them serves the zero-centred weight too.
    """
    dtype = accumulation_dtype(x.dtype)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    floor = torch.scalar_tensor(eps, dtype=dtype, device=x.device)
    scale = torch.addcmul(floor, length, length, value=1.0 / x.shape[-1]).rsqrt_()
    return x * scale
