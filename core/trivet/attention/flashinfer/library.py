"""Which FlashInfer is installed. Nothing here imports it."""

from __future__ import annotations

from importlib import metadata, util

TESTED_VERSION = "0.7.4"
"""The one version whose plan and run functions `trivet.attention.flashinfer.kernels` calls."""

DISTRIBUTION = "flashinfer-python"


def missing_library() -> str | None:
    """Why the library cannot be used on this machine, or None if it can."""
    wanted = f"{DISTRIBUTION} {TESTED_VERSION}"
    if util.find_spec("flashinfer") is None:
        return f"{wanted} is not installed: pip install 'trivet[cuda]'"
    try:
        found = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return f"a module named flashinfer is there, but not the distribution {wanted}: pip install 'trivet[cuda]'"
    if found != TESTED_VERSION:
        return f"{DISTRIBUTION} {found} is installed, and only {TESTED_VERSION} is tested: pip install 'trivet[cuda]'"
    return None


def missing_triton() -> str | None:
    """Why kernels of ours cannot be used on this machine, or None if they can."""
    if util.find_spec("triton") is None:
        return "triton is not installed: it comes with torch's builds for CUDA"
    return None
