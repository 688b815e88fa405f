"""Which optional libraries can be used, in which version. Nothing here imports them, but for one case of Triton's."""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from importlib import metadata, util
from pathlib import Path


def install_extra(extra: str) -> str:
    """How a missing optional part is installed. No index has Trivet."""
    return f"pip install '.[{extra}]' in a clone of Trivet"


EXTRA = install_extra("cuda")

TESTED_TRITON = "3.6."
"""How the versions of Triton begin that are tested: `trivet.launch` passes what their launcher takes, and the bounds of
kernels keep clear of what their compiler gets wrong."""


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
    """Why Triton kernels cannot be used on this machine's CUDA device, or None if they can.

    Triton compiles its driver module and the launcher of every kernel with a C compiler, unless it finds them in its
    cache. Where it can have no compiler, its driver module is asked for, which imports Triton: one that is in the cache
    says that kernels were built here before (``trivet warmup``).
    """
    if util.find_spec("triton") is None:
        return "Triton is not installed: it comes with torch's builds for CUDA"
    missing = missing_c_compiler()
    if missing is None:
        return None
    refused = _refused_by_triton()
    return f"Triton cannot compile its kernels' launchers ({refused}): {missing}" if refused is not None else None


def untested_triton() -> str | None:
    """What an untested version of Triton costs, and what to do, or None if it is a tested one, or there is none."""
    if util.find_spec("triton") is None:
        return None
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:  # brought by a distribution of another name
        version = "of an unknown version"
    if version.startswith(TESTED_TRITON):
        return None
    return (
        f"Triton {version} is installed, and only {TESTED_TRITON}x is tested: launches of its kernels take the host "
        f"about twice as long, and what its compiler makes of them was never tried: {EXTRA}"
    )


def missing_c_compiler() -> str | None:
    """What Triton lacks to compile C, and what to do, or None if it has everything.

    It takes the program that ``CC`` names, or gcc, or clang, and Python's header (``triton/runtime/build.py``, 3.6).
    """
    named = os.environ.get("CC")
    if named is not None and shutil.which(named) is None:
        return f"CC names {named!r}, which is no program; expected a C compiler: mend CC, or unset it and install gcc"
    if named is None and not any(map(shutil.which, ("gcc", "clang"))):
        return "there is no C compiler; expected gcc or clang, or one that CC names: install gcc"
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # Debian's, whose folder for headers is empty
    header = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    if not header.is_file():
        return f"there is a C compiler, but no {header}: install Python's development files (python3-dev)"
    return None


@cache
def _refused_by_triton() -> str | None:
    """What Triton says when it is asked for its driver module, which it loads from its cache or compiles."""
    try:
        from triton.runtime import driver

        driver.active  # noqa: B018 - it is made when it is first read
    except Exception as error:  # of a compiler, of a linker, or because of a driver that is not there
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None
