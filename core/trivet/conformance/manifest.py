"""Every check there is, in the order in which they run."""

from __future__ import annotations

from trivet.conformance.check import Check
from trivet.conformance.checks import (
    capabilities,
    capacity,
    checkpoint,
    config,
    device,
    layout,
    numerics,
    plan,
    plugin,
    prefix,
    sampling,
    serving,
    state,
    weights,
)

CHECKS: tuple[Check, ...] = (
    *plugin.CHECKS,
    *config.CHECKS,
    *capacity.CHECKS,
    *layout.CHECKS,
    *plan.CHECKS,
    *weights.CHECKS,
    *capabilities.CHECKS,
    *serving.CHECKS,
    *state.CHECKS,
    *prefix.CHECKS,
    *sampling.CHECKS,
    *numerics.CHECKS,
    *device.CHECKS,
    *checkpoint.CHECKS,
)
"""Ids are unique. What fails early often explains what fails later."""


def check_by_id(id: str) -> Check | None:
    """The check of that id, or None."""
    return next((check for check in CHECKS if check.id == id), None)
