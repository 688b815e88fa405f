"""The sizing arguments of `Runtime.load` and `plan_memory`, validated once."""

from __future__ import annotations

import math
import numbers
from typing import Any

from attrs import field, frozen

from trivet.capacity import Limits
from trivet.capacity.plan import NUMERIC_POLICIES
from trivet.dtypes import served
from trivet.errors import ConfigError

WEIGHT_SOURCES = ("checkpoint", "random")


def _plain(value: Any) -> Any:
    """Numbers of other libraries as Python's own; anything else as it is, to be refused by name."""
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _dtype(value: object) -> str | None:
    return None if value is None else served(value, "argument dtype")


@frozen(kw_only=True)
class SizingOptions:
    """What decides how large a runtime is. See `Runtime.load` for the meanings."""

    dtype: str | None = field(default=None, converter=_dtype)
    limits: Limits | None = None
    kv_pages: int | None = field(default=None, converter=_plain)
    memory_fraction: float = field(default=0.9, converter=_plain)
    prefix_cache: bool = True
    snapshot_stride: int | None = field(default=None, converter=_plain)
    snapshot_bytes: int | None = field(default=None, converter=_plain)
    numeric_policy: str = "tuned"
    cuda_graphs: bool = True
    attention: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.limits is not None and not isinstance(self.limits, Limits):
            raise ConfigError(f"limits is {self.limits!r}, expected a trivet.Limits or None")
        fraction = self.memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise ConfigError(f"memory_fraction is {fraction!r}, expected a number above 0 and at most 1")
        for name, least in (("kv_pages", 1), ("snapshot_stride", 1), ("snapshot_bytes", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(f"{name} is {value!r}, expected an integer of at least {least}, or None")
        if self.numeric_policy not in NUMERIC_POLICIES:
            raise ConfigError(
                f"numeric_policy is {self.numeric_policy!r}, expected one of {', '.join(NUMERIC_POLICIES)}"
            )
        for name in ("prefix_cache", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected True or False")

    def budget_bytes(self, device_memory_bytes: int) -> int:
        """What the whole runtime may take of a device's memory."""
        return math.floor(device_memory_bytes * self.memory_fraction)
