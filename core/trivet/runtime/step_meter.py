"""Tell which part of a step takes what is alive: its layers, attention, or logits and sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

from trivet.attention import PlanOwner
from trivet.runtime.meter import StorageMeter

Result = TypeVar("Result")


class StepMeter(StorageMeter):
    """A `StorageMeter` of steps whose forward part is announced, over owners that are `metered` by it.

    Attributes:
        layers_bytes: the most that was alive at once in a forward part, without what attention took.
        attention_bytes: the most that attention took: one call without the result that it made, and what earlier calls
            of the same step keep for later layers.
        forward_bytes: the most of both together.
        sampling_bytes: the most outside of forward parts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers_bytes = 0
        self.attention_bytes = 0
        self.forward_bytes = 0
        self.sampling_bytes = 0
        self._kept_bytes = 0

    def begin_forward(self) -> None:
        """The layers of a step begin; attention keeps nothing of the step before."""
        self.sampling_bytes = max(self.sampling_bytes, self.peak_bytes)
        self._kept_bytes = 0
        self.restart()

    def end_forward(self) -> None:
        """The layers of a step have ended."""
        self._note_layers()
        self.restart()

    def end(self) -> None:
        """The step has ended."""
        self.sampling_bytes = max(self.sampling_bytes, self.peak_bytes)

    def attention(self, call: Callable[[], Result]) -> Result:
        """What `call` of an owner gives, its temporaries counted as attention's."""
        self._note_layers()
        before_bytes = self.live_bytes
        self.restart()
        mark = self.mark()
        result = call()
        # A result that the call made is the layer's. One in a buffer of the owner, or in the query, took nothing.
        result_bytes = self.bytes_since(mark, result) if isinstance(result, torch.Tensor) else 0
        taken_bytes = self.peak_bytes - before_bytes - result_bytes
        self.attention_bytes = max(self.attention_bytes, self._kept_bytes + taken_bytes)
        self.forward_bytes = max(self.forward_bytes, self.peak_bytes)
        self._kept_bytes += self.live_bytes - before_bytes - result_bytes
        self.restart()
        return result

    def _note_layers(self) -> None:
        self.layers_bytes = max(self.layers_bytes, self.peak_bytes - self._kept_bytes)
        self.forward_bytes = max(self.forward_bytes, self.peak_bytes)


class _Metered:
    """A plan owner whose `append` and `attend` are attention's."""

    def __init__(self, owner: PlanOwner, meter: StepMeter) -> None:
        self._owner = owner
        self._meter = meter

    def __getattr__(self, name: str) -> object:
        return getattr(self._owner, name)

    def append(self, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The owner's own."""

        def append() -> None:
            self._owner.append(key, value, keys, values)

        self._meter.attention(append)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The owner's own."""
        return self._meter.attention(lambda: self._owner.attend(query, keys, values))


def metered(owner: PlanOwner, meter: StepMeter) -> PlanOwner:
    """`owner`, whose temporaries `meter` counts as attention's."""
    return cast(PlanOwner, _Metered(owner, meter))
