"""Room on the device for the few tests that want gigabytes of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

ROOM_BYTES = 20 * 2**30
"""Twice what the largest of them takes, since others may run at once."""


@contextmanager
def room_on_device(wanted_bytes: int = ROOM_BYTES) -> Iterator[None]:
    """Skip the test unless so much memory of the device is free, and hand back afterwards what it took."""
    if torch.cuda.is_available():
        free_bytes, _ = torch.cuda.mem_get_info()
        if free_bytes < wanted_bytes:
            pytest.skip(f"{free_bytes / 2**30:.0f} GiB of the device are free, this wants {wanted_bytes / 2**30:.0f}")
    try:
        yield
    finally:
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()
