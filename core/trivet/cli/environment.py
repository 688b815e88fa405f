"""What Trivet finds around it, and what each missing part costs. Imports torch only when asked."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from attrs import evolve, frozen

from trivet.attention.flashinfer.library import DISTRIBUTION, missing_library
from trivet.installed import missing_c_compiler, missing_triton, untested_triton


@frozen
class Part:
    """One part of the environment.

    Attributes:
        name: what it is.
        found: its version or place; None if it is missing.
        note: what its absence costs, or what is to be said of it.
    """

    name: str
    found: str | None
    note: str = ""


def environment() -> tuple[Part, ...]:
    """Every part, present or missing. All but Python and torch are optional."""
    return tuple(_parts())


def _parts() -> Iterator[Part]:
    yield Part("Python", platform.python_version())
    yield from _torch()
    yield _tested(
        "FlashInfer",
        DISTRIBUTION,
        missing_library(),
        "attention on CUDA runs on the reference backend, which is slower",
    )
    yield _triton()
    yield _compiler()
    yield _distribution("transformers", "transformers", "families that are checked against it have no numerics tier")


def _torch() -> Iterator[Part]:
    try:
        import torch
    except Exception as error:
        yield Part("torch", None, f"no model runs: {type(error).__name__}: {error}")
        return
    yield Part("torch", torch.__version__)
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        yield Part("CUDA", f"{torch.version.cuda}: {names}")
    elif torch.version.cuda is None:
        yield Part("CUDA", None, "models run on the CPU: this torch is built without CUDA")
    else:
        yield Part("CUDA", None, f"models run on the CPU: torch for CUDA {torch.version.cuda} sees no device")


def _triton() -> Part:
    cost = "kernels written in it are not used"
    found = _distribution("Triton", "triton", cost)
    if found.found is None:
        return found
    found = evolve(found, note=untested_triton() or "")
    if not _sees_device():
        return found
    missing, compiler = missing_triton(), missing_c_compiler()
    if missing is not None:
        return evolve(found, note=f"{missing}; without it {cost}")
    if compiler is not None:
        return evolve(found, note=f"only kernels that are in its cache can be launched, since {compiler}")
    return found


def _sees_device() -> bool:
    try:
        import torch
    except Exception:  # said by `_torch`
        return False
    return torch.cuda.is_available()


def _tested(name: str, distribution: str, missing: str | None, cost: str) -> Part:
    """A library of which one version is used: another one costs what a missing one does."""
    return Part(name, _version(distribution), f"{missing}; without it {cost}" if missing else "")


def _distribution(name: str, distribution: str, cost: str) -> Part:
    found = _version(distribution)
    return Part(name, found, "" if found is not None else f"{cost}; pip install {distribution}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _compiler() -> Part:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc") or (shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None)
    host = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    missing = [name for name, path in (("nvcc", nvcc), ("a C++ compiler", host)) if path is None]
    if missing:
        cost = "kernels that are not built beforehand cannot be compiled on first use"
        return Part("compiler for JIT", None, f"{' and '.join(missing)} not found: {cost}")
    return Part("compiler for JIT", f"{nvcc}, {host}")
