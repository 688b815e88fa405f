"""The gated MLP."""

from __future__ import annotations

from torch import Tensor

from trivet.layers.linear import Linear
from trivet.layers.parameters import Parameters
from trivet.ops.activation import silu_and_mul


class GatedMlp:
    """``down(silu(gate(x)) * up(x))`` (SwiGLU, arXiv 2002.05202), gate and up as one matrix.

    Args:
        parameters: holds ``gate_up`` (gate rows first) and ``down``.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.gate_up = Linear(parameters.below("gate_up"))
        self.down = Linear(parameters.below("down"))

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[tokens, hidden_size]`` to the same shape."""
        return self.down(silu_and_mul(self.gate_up(hidden)))
