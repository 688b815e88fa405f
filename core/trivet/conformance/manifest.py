"""Every check there is, in the order in which they run."""

from __future__ import annotations

from trivet.conformance.check import Check
from trivet.conformance.checks import (
    capabilities,
    capacity,
    checkpoint,
    config,
    device,
    isolation,
    kept,
    layout,
    ledger,
    numerics,
    plan,
    plugin,
    prefix,
    process,
    sampling,
    serving,
    state,
    tiny_models,
    weights,
)

CHECKS: tuple[Check, ...] = (
    *plugin.CHECKS,
    *tiny_models.CHECKS,
    *config.CHECKS,
    *capacity.CHECKS,
    *layout.CHECKS,
    *ledger.CHECKS,
    *plan.CHECKS,
    *numerics.EARLY_CHECKS,
    *weights.CHECKS,
    *capabilities.CHECKS,
    *isolation.CHECKS,
    *state.CHECKS,
    *isolation.LATE_CHECKS,
    *process.CHECKS,
    *sampling.CHECKS,
    *serving.EARLY_CHECKS,
    *prefix.CHECKS,
    *serving.CHECKS,
    *ledger.LATE_CHECKS,
    *kept.CHECKS,
    *numerics.CHECKS,
    *device.CHECKS,
    *checkpoint.CHECKS,
)
"""Ids are unique. The narrow promises come before the broad ones, which fail too where a narrow one does not hold: what
fails first names the cause best."""
