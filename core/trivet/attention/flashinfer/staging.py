"""Pinned mirrors of a plan's buffers, in two sets, each guarded by an event.

A copy from pinned memory is only queued when it returns; the host must not write there until the device has read it.
While the device works on one step the host prepares the next in the other set, and waits only when it is two steps
ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from trivet.layout import Buffers
from trivet.layout.staging import STAGING_SETS, mirror_name

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor


class Fence(Protocol):
    """A point in the device's work, as `torch.cuda.Event` is."""

    def record(self) -> None:
        """Mark what has been queued so far."""

    def synchronize(self) -> None:
        """Wait until the device has passed the mark; at once if there is none."""


class StreamFence:
    """A fence in the current stream of a CUDA device, whichever device is the current one."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._event = torch.cuda.Event()

    def record(self) -> None:
        """See `Fence.record`."""
        import torch

        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """See `Fence.synchronize`."""
        self._event.synchronize()


class StagingSet:
    """One set of mirrors.

    Attributes:
        mirrors: by the name of the buffer that each is copied to.
        arrays: the int32 ones again, as numpy sees them.
    """

    def __init__(self, mirrors: dict[str, Tensor], indices: tuple[str, ...], fence: Fence) -> None:
        self.mirrors = mirrors
        self.arrays: dict[str, NDArray[np.int32]] = {name: mirrors[name].numpy() for name in indices}
        self._fence = fence

    def wait(self) -> None:
        """Wait until the device has read what this set held."""
        self._fence.synchronize()

    def sent(self) -> None:
        """All copies out of this set are queued."""
        self._fence.record()


class Staging:
    """The sets in turn.

    Args:
        buffers: of a FlashInfer layout.
        names: buffers that have mirrors.
        indices: those of them that hold int32.
        fence: makes a fence on the device of `buffers`.
    """

    def __init__(
        self, buffers: Buffers, names: tuple[str, ...], indices: tuple[str, ...], fence: Callable[[], Fence]
    ) -> None:
        self.sets = [
            StagingSet({name: buffers[mirror_name(name, number)] for name in names}, indices, fence())
            for number in range(STAGING_SETS)
        ]
        self._next = 0

    def take(self) -> StagingSet:
        """The next set, once the device has read what it held."""
        taken = self.sets[self._next]
        self._next = (self._next + 1) % len(self.sets)
        taken.wait()
        return taken
