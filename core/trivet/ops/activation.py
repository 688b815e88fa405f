"""The activation of gated MLPs."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of a gated MLP (SwiGLU, arXiv 2002.05202) whose two projections lie side by side.

    Args:
        gate_up: ``[tokens, 2 * intermediate]``, gate first.

    Returns:
        A new contiguous tensor ``[tokens, intermediate]`` of the same dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
