"""Plan a runtime's memory from config.json alone: no weights, no GPU, no torch."""

from __future__ import annotations

import os
from typing import Any

from trivet.capacity import DeviceProfile, Limits
from trivet.plugin.manager import PluginManager
from trivet.reservation import MemoryLedger
from trivet.runtime.blueprint import draw_blueprint
from trivet.runtime.locate import locate_checkpoint
from trivet.runtime.options import SizingOptions


def plan_memory(
    checkpoint: str | os.PathLike[str],
    device: str | DeviceProfile = "cpu",
    *,
    device_memory_bytes: int | None = None,
    limits: Limits | None = None,
    dtype: str | None = None,
    **sizing: Any,
) -> MemoryLedger:
    """The ledger that `Runtime.load` would have, without loading anything.

    Args:
        checkpoint: directory with config.json, or the name of a model that ships with Trivet.
        device: ``"cpu"``, the name of a shipped device profile (``"h200"``, ...), or a `DeviceProfile`.
        device_memory_bytes: memory of the device; None takes the profile's.
        limits, dtype, sizing: as in `Runtime.load`: kv_pages, memory_fraction, prefix_cache, snapshot_stride,
            snapshot_bytes, numeric_policy, cuda_graphs, attention.

    Raises:
        ConfigError, CapacityExceeded, MemoryBudgetError, PluginError: as `Runtime.load`.
        TypeError: an argument that is not a sizing argument.
    """
    options = SizingOptions(limits=limits, dtype=dtype, **sizing)
    if isinstance(device, DeviceProfile):
        profile = device
    else:
        profile = DeviceProfile.named(device, device_memory_bytes)
    directory = locate_checkpoint(checkpoint)
    return draw_blueprint(directory, options, profile, PluginManager.discover()).ledger
