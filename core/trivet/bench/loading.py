"""The arguments of `Runtime.load` that a benchmark needs, beside those that were asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivet.capacity import Limits

STEP_TOKENS = {"cpu": 512, "cuda": 4096}
"""Tokens that one step may compute, by kind of device."""
PAGE_SIZE = 16


def with_limits(load: Mapping[str, Any], max_requests: int, max_context: int) -> dict[str, Any]:
    """`load` with whole limits: those of the benchmark, and over them those in ``load["limits"]``, a mapping."""
    from trivet.runtime.device import resolve_device

    device, _ = resolve_device(load.get("device"))
    limits = {
        "max_requests": max_requests,
        "max_step_tokens": max(STEP_TOKENS[device.type], max_requests),
        "max_context": max_context,
        "page_size": PAGE_SIZE,
        **load.get("limits", {}),
    }
    return {**load, "limits": Limits(**limits)}
