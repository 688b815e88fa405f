"""A projection."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from trivet.layers.parameters import Parameters


class Linear:
    """``input @ weight.T + bias``.

    Args:
        parameters: holds ``weight [out, in]`` and, where the weight map lists one, ``bias [out]``.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.weight = parameters["weight"]
        self.bias = parameters.get("bias")

    def __call__(self, inputs: Tensor) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out]``."""
        return linear(inputs, self.weight, self.bias)
