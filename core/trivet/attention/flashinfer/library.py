"""Which FlashInfer is installed. Nothing here imports it."""

from __future__ import annotations

from trivet.installed import missing_distribution

TESTED_VERSION = "0.7.4"
"""The one version whose plan and run functions `trivet.attention.flashinfer.kernels` calls."""

DISTRIBUTION = "flashinfer-python"


def missing_library() -> str | None:
    """Why the library cannot be used on this machine, or None if it can."""
    return missing_distribution("flashinfer", DISTRIBUTION, TESTED_VERSION)
