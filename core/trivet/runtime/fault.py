"""What an exception that was raised in the middle of device work means, and what it must not keep alive."""

from __future__ import annotations

import traceback

import torch


def lost_device(device: torch.device, error: BaseException) -> BaseException | None:
    """The fault that has made a device unusable, so that every later call fails; None if it works.

    A CUDA device is asked, once all that is queued has run: the class of `error` does not tell, since running out of
    pinned memory raises the same class as an illegal address, and libraries raise others.
    """
    if device.type != "cuda":
        lost = isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)
        return error if lost else None
    try:
        torch.cuda.synchronize(device)
    except Exception as fault:
        return fault
    return None


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
