"""A model's parameters by name, as the layers ask for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trivet.errors import PluginError


class Parameters:
    """A view on the loaded parameters below a prefix.

    Attributes:
        pinned: whether layers are to compute each token in a way that the rest of the batch does not change by a bit
            (``numeric_policy="pinned"``). The shared layers do; a family's own must, or refuse.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str = "", *, pinned: bool = False) -> None:
        self._tensors = tensors
        self._prefix = prefix
        self.pinned = pinned

    def below(self, name: str) -> Parameters:
        """The parameters below ``name.``."""
        return Parameters(self._tensors, f"{self._prefix}{name}.", pinned=self.pinned)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The parameter `name`; `PluginError` if the weight map lists none."""
        tensor = self.get(name)
        if tensor is None:
            raise PluginError(
                f"a layer asks for parameter {self._prefix + name!r}, which the family's weight map does not list; "
                "name it there, or ask for one of the names that it has"
            )
        return tensor

    def get(self, name: str) -> torch.Tensor | None:
        """The parameter `name`, or None where the weight map lists none (an absent bias)."""
        return self._tensors.get(self._prefix + name)
