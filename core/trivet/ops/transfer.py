"""From the host to the device without waiting for what the device is at."""

from __future__ import annotations

import torch


def to_device(values: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy of the host's `values` on `device`, in stream order; `values` themselves where that is the host.

    A copy from ordinary memory to a CUDA device waits until the device has done all its queued work; one from pinned
    memory is queued. torch keeps the pinned memory until the copy is done, and uses it again.
    """
    if torch.device(device).type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
