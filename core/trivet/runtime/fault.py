"""What an exception that was raised in the middle of device work means, and what it must not keep alive."""

from __future__ import annotations

import traceback

import torch


def device_is_lost(error: BaseException) -> bool:
    """Whether a CUDA fault has poisoned the process's context, after which every call fails."""
    return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)


def release_locals(error: BaseException) -> None:
    """Clear the local variables of the frames that `error`, and what led to it, were raised through.

    Somebody keeps the error: a request's completion, or a caller that tries again with less memory. Through its
    traceback it would keep every tensor of those frames. Frames that are still running are left alone.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        traceback.clear_frames(found.__traceback__)
        pending += [found.__cause__, found.__context__]
