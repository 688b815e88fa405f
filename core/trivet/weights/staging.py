"""Copies from memory-mapped files to a CUDA device through page-locked blocks.

A copy from ordinary memory to a CUDA device holds the host until it is done. One from page-locked memory is queued, so
that the host reads the next block from the file, and converts it, while the device takes the last one.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)

BLOCK_BYTES = 64 * 2**20
"""Bytes of one block; tensors are copied in pieces of at most this size."""

BLOCKS = 2
"""One that the host fills, and one that the device reads."""

HOST_REGISTER_PORTABLE = 1
"""``cudaHostRegisterPortable``: page-locked for every device."""

Copy = Callable[["Tensor", "Tensor"], None]
"""Copies the second tensor, on the host, into the first, which has its shape, and perhaps another dtype."""


class Queued(Protocol):
    """Work that was queued, as `torch.cuda.Event` tells of it."""

    def synchronize(self) -> None:
        """Wait until it is done."""


Send = Callable[["Tensor", "Tensor"], Queued]
"""Queues a copy of the second tensor, part of a block, into the first, of the same shape and dtype."""


def pieces(target: Tensor, source: Tensor, block_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`target` and `source`, of one shape, cut alike into pieces whose part of `target` has at most `block_bytes`.

    Cut along dimension 0 in whole rows; a row that is larger, along the next dimension. An element is never cut.
    """
    if target.nbytes <= block_bytes or not target.dim():
        yield target, source
        return
    rows = len(target)
    step = block_bytes * rows // target.nbytes
    for first in range(0, rows, max(step, 1)):
        if step:
            yield target[first : first + step], source[first : first + step]
        else:
            yield from pieces(target[first], source[first], block_bytes)


class Stager:
    """Fills blocks in turn and sends each on. A block is filled again only when what was sent from it has arrived.

    Args:
        blocks: bytes on the host, uint8 and aligned for every dtype.
        send: queues the copy out of a block.
    """

    def __init__(self, blocks: Sequence[Tensor], send: Send) -> None:
        self._blocks = tuple(blocks)
        self._sent: list[Queued | None] = [None] * len(self._blocks)
        self._send = send
        self._turn = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of `source` into `target`, of the same shape and no larger than a block.

        The host converts to the dtype of `target`, as it does for a copy within its own memory. Strides may be any.
        `source` is read when this returns.
        """
        turn = self._turn
        sent = self._sent[turn]
        if sent is not None:
            sent.synchronize()
        staged = self._blocks[turn][: target.nbytes].view(target.dtype).view(target.shape)
        staged.copy_(source)
        self._sent[turn] = self._send(target, staged)
        self._turn = (turn + 1) % len(self._blocks)

    def wait(self) -> None:
        """Wait until everything has arrived."""
        for sent in self._sent:
            if sent is not None:
                sent.synchronize()


def copies(block_bytes: int, *, to_cuda: bool) -> AbstractContextManager[Copy]:
    """How pieces of at most `block_bytes` are copied: to CUDA tensors through blocks, within the host straight."""
    return staged_copies(block_bytes) if to_cuda else nullcontext(straight_copy)


def straight_copy(target: Tensor, source: Tensor) -> None:
    """A copy within the host's memory."""
    target.copy_(source)


@contextmanager
def staged_copies(block_bytes: int) -> Iterator[Copy]:
    """Copies to CUDA tensors, of pieces of at most `block_bytes`, in the order of the device's current stream.

    At the end, also of a load that failed, all copies are done and the blocks are given back.
    """
    with ExitStack() as locked:
        stager = Stager([locked.enter_context(page_locked(block_bytes)) for _ in range(BLOCKS)], send_to_device)
        try:
            yield stager.copy
        finally:
            stager.wait()


def send_to_device(target: Tensor, staged: Tensor) -> torch.cuda.Event:
    """Queue a copy from page-locked memory into a CUDA tensor; the event passes when it is done."""
    import torch

    target.copy_(staged, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(target.device))
    return event


@contextmanager
def page_locked(size_bytes: int) -> Iterator[Tensor]:
    """So many bytes of page-locked host memory, uint8, whole pages of its own, given back to the system at the end.

    torch's own pinned memory stays with torch when it is freed. Where the host locks none, it is ordinary memory: a
    copy out of that holds the host, and is right all the same.
    """
    import torch

    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    cuda = torch.cuda.cudart()
    error = int(cuda.cudaHostRegister(block.data_ptr(), size_bytes, HOST_REGISTER_PORTABLE))
    if error:
        with suppress(RuntimeError):  # CUDA keeps the error for the next launch that is checked: let it be this one
            torch.zeros(1, device="cuda")
        logger.warning(
            "the host cannot page-lock %d bytes to stage weights (CUDA error %d): they are copied out of ordinary "
            "memory, which is slower",
            size_bytes,
            error,
        )
        yield block
        return
    try:
        yield block
    finally:
        cuda.cudaHostUnregister(block.data_ptr())  # fails only with the device, which waiting for copies has told
