"""The frame of a decoder-only model: embedding, layers, final norm, output projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor
from torch.nn.functional import embedding

from trivet.layers.context import StepContext
from trivet.layers.linear import Linear
from trivet.layers.norm import RmsNorm
from trivet.layers.parameters import Parameters

Layer = Callable[[Tensor, StepContext], Tensor]


class DecoderModel(Protocol):
    """What the runtime asks of a family's model."""

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Hidden states of the step, ``[tokens, hidden_size]``, for int64 ``token_ids [tokens]``.

        Those of ``step.outputs`` alone if a layer has asked `StepContext.wanted`.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [rows, hidden_size]`` to ``[rows, vocab_size]``."""


class Decoder:
    """A decoder over a list of layers.

    Args:
        parameters: holds ``embedding`` and, where embeddings are not tied, ``output``.
        layers: each maps ``(hidden, step)`` to hidden, which it may write in place.
        norm: the final norm.
    """

    def __init__(self, parameters: Parameters, layers: Sequence[Layer], norm: RmsNorm) -> None:
        self.embedding_weight = parameters["embedding.weight"]
        untied = parameters.get("output.weight")
        output = {"weight": self.embedding_weight if untied is None else untied}
        self.output = Linear(Parameters(output, pinned=parameters.pinned))
        self.layers = tuple(layers)
        self.norm = norm

    def __call__(self, token_ids: Tensor, step: StepContext) -> Tensor:
        """Hidden states before the final norm, ``[tokens, hidden_size]``, or of ``step.outputs`` alone."""
        hidden = embedding(token_ids, self.embedding_weight)
        for layer in self.layers:
            hidden = layer(hidden, step)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output projection of the rows that need logits."""
        return self.output(self.norm(hidden))
