"""Which device a runtime lives on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from trivet.capacity import DeviceProfile
from trivet.errors import ConfigError


def resolve_device(device: str | None) -> tuple[torch.device, DeviceProfile]:
    """The torch device and its profile; None picks CUDA if there is one.

    Raises:
        ConfigError: the device is unknown or not there.
    """
    name = device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
    expected = "expected 'cpu', 'cuda' or 'cuda:N'"
    try:
        resolved = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {device!r}, {expected}") from error
    if resolved.type == "cpu":
        return torch.device("cpu"), DeviceProfile.named("cpu")
    if resolved.type != "cuda":
        raise ConfigError(f"device is {device!r}, {expected}")
    if not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, but torch sees no CUDA device; use device='cpu'")
    index = resolved.index if resolved.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device is {device!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index), DeviceProfile.of_cuda(index)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, on which libraries are probed and Triton launches kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
