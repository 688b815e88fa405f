"""The committed table of a device that is here."""

from __future__ import annotations

from functools import cache

import torch

from trivet.ops.fused.table import DeviceTable, committed_tables


@cache
def _of_index(index: int) -> DeviceTable:
    return committed_tables().get(torch.cuda.get_device_name(index).lower(), DeviceTable())


def device_table(device: torch.device) -> DeviceTable:
    """What was measured on `device`; an empty table for one that was not."""
    if device.type != "cuda":
        return DeviceTable()
    return _of_index(torch.cuda.current_device() if device.index is None else device.index)


@cache
def dependent_launch(index: int) -> bool:
    """Whether kernels overlap with the one before them (programmatic dependent launch), as a device's table says.

    `index` is what ``Tensor.get_device()`` gives: -1, the CPU, has no table.
    """
    return index >= 0 and device_table(torch.device("cuda", index)).dependent_launch
