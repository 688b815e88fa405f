"""Trivet, a model-runtime SDK for large language models.

The names below are the public API for users of a runtime; `trivet.plugin` is that of plugin authors. Importing
this package imports neither torch nor any of its rooms: each name is fetched when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trivet import plugin
    from trivet.capacity.device import DeviceProfile
    from trivet.capacity.limits import Limits
    from trivet.errors import (
        CapacityExceeded,
        CheckpointError,
        ConfigError,
        MemoryBudgetError,
        PluginError,
        RequestRejected,
        RuntimeDown,
        StepFailed,
        TrivetError,
        UnusableLogits,
    )
    from trivet.reservation.ledger import LedgerLine, MemoryLedger
    from trivet.runtime.handle import Request
    from trivet.runtime.plan import plan_memory
    from trivet.runtime.results import Completion, Timings, Token
    from trivet.runtime.runtime import Runtime
    from trivet.runtime.step import StepReport
    from trivet.sampling.logprobs import TokenLogprob
    from trivet.sampling.params import Sampling

__version__ = "0.1.0"

__all__ = [
    # running a model
    "Completion",
    "Limits",
    "Request",
    "Runtime",
    "Sampling",
    "StepReport",
    "Timings",
    "Token",
    "TokenLogprob",
    # planning its memory
    "DeviceProfile",
    "LedgerLine",
    "MemoryLedger",
    "plan_memory",
    # errors
    "CapacityExceeded",
    "CheckpointError",
    "ConfigError",
    "MemoryBudgetError",
    "PluginError",
    "RequestRejected",
    "RuntimeDown",
    "StepFailed",
    "TrivetError",
    "UnusableLogits",
    # writing plugins
    "plugin",
    # this package
    "__version__",
]

_HOME = {
    "CapacityExceeded": "trivet.errors",
    "CheckpointError": "trivet.errors",
    "Completion": "trivet.runtime.results",
    "ConfigError": "trivet.errors",
    "DeviceProfile": "trivet.capacity.device",
    "LedgerLine": "trivet.reservation.ledger",
    "Limits": "trivet.capacity.limits",
    "MemoryBudgetError": "trivet.errors",
    "MemoryLedger": "trivet.reservation.ledger",
    "PluginError": "trivet.errors",
    "Request": "trivet.runtime.handle",
    "RequestRejected": "trivet.errors",
    "Runtime": "trivet.runtime.runtime",
    "RuntimeDown": "trivet.errors",
    "StepFailed": "trivet.errors",
    "Sampling": "trivet.sampling.params",
    "StepReport": "trivet.runtime.step",
    "Timings": "trivet.runtime.results",
    "Token": "trivet.runtime.results",
    "TokenLogprob": "trivet.sampling.logprobs",
    "TrivetError": "trivet.errors",
    "UnusableLogits": "trivet.errors",
    "plan_memory": "trivet.runtime.plan",
}
"""The module in which each public name is defined. `TYPE_CHECKING` above says the same to type checkers."""


def __getattr__(name: str) -> object:
    if name == "plugin":
        return importlib.import_module("trivet.plugin")
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'trivet' has no attribute {name!r}") from None
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
