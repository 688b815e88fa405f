"""A projection."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from trivet.layers.parameters import Parameters
from trivet.ops.dispatch import pinned_matmul, small_batch_matmul


class Linear:
    """``input @ weight.T + bias``.

    Args:
        parameters: holds ``weight [out, in]`` and, where the weight map lists one, ``bias [out]``. Where they are
            pinned, a row's output does not depend on the rows beside it.

    Raises:
        ConfigError: they are pinned, and there are no such products for this weight.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.weight = parameters["weight"]
        self.bias = parameters.get("bias")
        self._pinned = pinned_matmul(self.weight) if parameters.pinned else None
        self._small_batch = None if parameters.pinned else small_batch_matmul(self.weight)

    def __call__(self, inputs: Tensor, residual: Tensor | None = None) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out]``.

        Args:
            residual: ``[tokens, out]``, what the output is added to, in place; the sum is rounded once. It is then
                what is returned.
        """
        if self._pinned is not None:
            return self._pinned(inputs, self.bias, residual)
        if self._small_batch is not None:
            out = self._small_batch(inputs, self.bias, residual)
            if out is not None:
                return out
        if residual is None:
            return linear(inputs, self.weight, self.bias)
        if self.bias is not None:
            residual.add_(self.bias)
        return residual.addmm_(inputs, self.weight.T)
