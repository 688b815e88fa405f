"""The gated MLP."""

from __future__ import annotations

from torch import Tensor

from trivet.layers.linear import Linear
from trivet.layers.parameters import Parameters
from trivet.ops.activation import silu_and_mul
from trivet.ops.dispatch import small_batch_matmul


class GatedMlp:
    """``down(silu(gate(x)) * up(x))`` (SwiGLU, arXiv 2002.05202), gate and up as one matrix.

    Args:
        parameters: holds ``gate_up`` (gate rows first) and ``down``.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.gate_up = Linear(parameters.below("gate_up"))
        self.down = Linear(parameters.below("down"))
        self._gated_product = (
            None
            if parameters.pinned or self.gate_up.bias is not None
            else small_batch_matmul(self.gate_up.weight, gated=True)
        )

    def __call__(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """``[tokens, hidden_size]`` to the same shape, added to `residual` in place if there is one."""
        gated = None if self._gated_product is None else self._gated_product(hidden)
        if gated is None:
            gated = silu_and_mul(self.gate_up(hidden))
        return self.down(gated, residual)
