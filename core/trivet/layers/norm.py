"""RMS norm over the last dimension."""

from __future__ import annotations

from torch import Tensor

from trivet.layers.parameters import Parameters
from trivet.ops.norm import rms_norm


class RmsNorm:
    """Root-mean-square norm (arXiv 1910.07467), its mean square in float32.

    Args:
        parameters: holds ``weight [size]``.
        eps: added to the mean square.
        zero_centred: multiply by ``1 + weight`` in float32 instead of by ``weight``.
    """

    def __init__(self, parameters: Parameters, eps: float, *, zero_centred: bool = False) -> None:
        self.weight = parameters["weight"]
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[..., size]`` to the same shape and dtype."""
        return rms_norm(hidden, self.weight, self.eps, zero_centred=self.zero_centred)
