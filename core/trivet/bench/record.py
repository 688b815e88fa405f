"""The record of one benchmark: what was run, on what, and every raw sample, as one JSON object in a file."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from trivet.errors import ConfigError

SCHEMA_VERSION = 1
VERSIONS_OF = ("torch", "numpy", "transformers", "tokenizers", "flashinfer-python", "fla-core", "triton")


@frozen
class Record:
    """What one run of a benchmark keeps.

    Attributes:
        benchmark: ``"decode"``, ``"decode-arms"``, ``"decode-peer"``, ``"generate"``, ``"serve"``, ``"startup"``,
            ``"host"`` or ``"gate"``.
        command: the command line that repeats it, without the folder of the record.
        settings: every option, the defaults included.
        results: what was measured: raw samples, and the figures that were printed.
        schema_version: of this object's shape.
        started: when, UTC, ISO 8601.
        commit: of the checkout that the package lies in, with ``+`` behind it where files differ from it; None
            outside of a checkout.
        versions: of Python, Trivet and the libraries that are there.
        machine: processor, memory, system and, with CUDA, the GPU. No host name, no path.
    """

    benchmark: str
    command: str
    settings: Mapping[str, Any]
    results: Mapping[str, Any]
    schema_version: int
    started: str
    commit: str | None
    versions: Mapping[str, str]
    machine: Mapping[str, Any]

    @classmethod
    def of(
        cls, benchmark: str, command: str, settings: Mapping[str, Any], results: Mapping[str, Any], started: datetime
    ) -> Record:
        """A record of `results` with all that is known of this process.

        Args:
            settings: the ``"device"`` among them is the one whose GPU is described.
            results: a ``"machine"`` among them is what another process, which was measured, said of its own; it takes
                the place of this process's.
        """
        measured = dict(results)
        machine = measured.pop("machine", None)
        return cls(
            benchmark=benchmark,
            command=command,
            settings=settings,
            results=measured,
            schema_version=SCHEMA_VERSION,
            started=started.isoformat(timespec="seconds"),
            commit=_commit(),
            versions=_versions(),
            machine=machine_of(settings.get("device")) if machine is None else machine,
        )

    def write(self, folder: Path) -> Path:
        """Write the record into `folder`, under a name that no other record has; returns its path.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        stamp = self.started.replace("-", "").replace(":", "").partition("+")[0]
        text = json.dumps(asdict(self), indent=None, separators=(",", ":")) + "\n"
        make_folder(folder)
        for number in itertools.count(1):
            suffix = f"-{number}" if number > 1 else ""
            path = folder / f"{self.benchmark}-{stamp}Z{suffix}.json"
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                continue
            except OSError as error:
                raise _unwritable(folder, error) from error
            return path
        raise AssertionError("numbers do not end")


def make_folder(folder: Path) -> None:
    """Make the folder that records go to; `ConfigError` if that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--out {folder}: a record cannot be written there: {error.strerror or error}; name another folder"
    )


def now() -> datetime:
    """The time, UTC."""
    return datetime.now(UTC)


def _commit() -> str | None:
    """The commit of the checkout that tracks this very file; an unrelated checkout around it does not count."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if commit and changed else commit


def _versions() -> dict[str, str]:
    from trivet import __version__

    versions = {"python": platform.python_version(), "trivet": __version__}
    for name in VERSIONS_OF:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def machine_of(device: str | None) -> dict[str, Any]:
    """The machine as this process sees it: with torch imported, its threads too, and with CUDA the GPU.

    Args:
        device: as in `Runtime.load`; where it names no GPU, the current one is described.
    """
    machine: dict[str, Any] = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
    }
    if hasattr(os, "getloadavg"):
        machine["load_average"] = [round(load, 2) for load in os.getloadavg()]
    torch = sys.modules.get("torch")
    if torch is not None:
        machine["torch_threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            named = torch.device(device or "cuda")
            index = named.index if named.type == "cuda" else None
            properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
            machine["gpu"] = properties.name
            machine["gpu_memory_bytes"] = properties.total_memory
            machine["cuda"] = torch.version.cuda
    return machine


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
