"""Which optional libraries are installed, in which version. Nothing here imports them."""

from __future__ import annotations

from importlib import metadata, util

EXTRA = "pip install 'trivet[cuda]'"


def missing_distribution(module: str, distribution: str, version: str) -> str | None:
    """Why `module` of `distribution` cannot be used on this machine, or None if it can.

    Args:
        version: the one version that is tested.
    """
    wanted = f"{distribution} {version}"
    if util.find_spec(module) is None:
        return f"{wanted} is not installed: {EXTRA}"
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"a module named {module} is there, but not the distribution {wanted}: {EXTRA}"
    if found != version:
        return f"{distribution} {found} is installed, and only {version} is tested: {EXTRA}"
    return None


def missing_triton() -> str | None:
    """Why Triton kernels cannot be used on this machine, or None if they can."""
    if util.find_spec("triton") is None:
        return "Triton is not installed: it comes with torch's builds for CUDA"
    return None
