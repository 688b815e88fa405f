"""The activation of gated MLPs."""

import torch.nn.functional as F
from torch import Tensor

from trivet.ops.dispatch import fused_kernels


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of a gated MLP (SwiGLU, arXiv 2002.05202) whose two projections lie side by side.

    Args:
        gate_up: ``[tokens, 2 * intermediate]``, gate first.

    Returns:
        A new contiguous tensor ``[tokens, intermediate]`` of the same dtype.
    """
    kernels = fused_kernels(gate_up)
    if kernels is not None and gate_up.dim() == 2 and gate_up.stride(1) == 1:
        gated: Tensor = kernels.silu_and_mul(gate_up)
        return gated
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
