"""What sizes depend on in a device. Profiles of common GPUs ship as data, for planning without the GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from attrs import field, frozen

from trivet.errors import ConfigError

CONTAINER_LIMIT_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where Linux says how much memory a container may take, in its newer and its older form."""


def _pair(value: Sequence[int] | None) -> tuple[int, int] | None:
    if value is None:
        return None
    major, minor = value
    return int(major), int(minor)


@frozen
class DeviceProfile:
    """A device as far as memory planning is concerned.

    Attributes:
        name: short name, for example ``"h200"`` or ``"cpu"``.
        kind: ``"cpu"`` or ``"cuda"``.
        memory_bytes: memory of the device, in bytes.
        multiprocessors: streaming multiprocessors (1 on a CPU).
        compute_capability: CUDA compute capability, or None on a CPU.
        present: whether it is a CUDA device of this machine, on which kernels can be probed; a shipped profile is
            not, whatever machine it is read on.
    """

    name: str
    kind: str
    memory_bytes: int
    multiprocessors: int = 1
    compute_capability: tuple[int, int] | None = field(default=None, converter=_pair)
    present: bool = False

    @property
    def launches_dependent(self) -> bool:
        """Whether a kernel can be launched while the one before it in the stream still runs, and waits for that one's
        results on the device (programmatic dependent launch, from compute capability 9.0 on)."""
        return self.compute_capability is not None and self.compute_capability >= (9, 0)

    @classmethod
    def named(cls, name: str, memory_bytes: int | None = None) -> DeviceProfile:
        """The shipped profile `name`, or this machine's CPU for ``"cpu"``.

        `memory_bytes` replaces the profile's memory. Raises `ConfigError` for a name that is not shipped.
        """
        if memory_bytes is not None and (
            not isinstance(memory_bytes, int) or isinstance(memory_bytes, bool) or memory_bytes < 1
        ):
            raise ConfigError(f"device memory is {memory_bytes!r} bytes, expected an integer of at least 1")
        if name == "cpu":
            return cls(name="cpu", kind="cpu", memory_bytes=memory_bytes or _host_memory_bytes())
        shipped = shipped_profiles()
        key = name.lower() if isinstance(name, str) else None
        if key is None or key not in shipped:
            raise ConfigError(f"no device profile named {name!r}: expected cpu or one of {', '.join(sorted(shipped))}")
        entry = shipped[key]
        return cls(
            name=key,
            kind="cuda",
            memory_bytes=memory_bytes or int(entry["memory_bytes"]),
            multiprocessors=int(entry["multiprocessors"]),
            compute_capability=entry["compute_capability"],
        )

    @classmethod
    def of_cuda(cls, index: int) -> DeviceProfile:
        """Profile of the CUDA device `index` of this machine, read from the driver."""
        import torch

        properties = torch.cuda.get_device_properties(index)
        return cls(
            name=properties.name,
            kind="cuda",
            memory_bytes=properties.total_memory,
            multiprocessors=properties.multi_processor_count,
            compute_capability=(properties.major, properties.minor),
            present=True,
        )


def shipped_profiles() -> dict[str, dict[str, Any]]:
    """The device profiles that ship as data, by name (`profiles.json`)."""
    text = resources.files("trivet.capacity").joinpath("profiles.json").read_text(encoding="utf-8")
    profiles: dict[str, dict[str, Any]] = json.loads(text)
    return profiles


def _host_memory_bytes() -> int:
    """Memory of this machine, or what a container leaves of it if that is less."""
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical_bytes, *filter(None, map(_limit_bytes, CONTAINER_LIMIT_FILES))])


def _limit_bytes(file: Path) -> int | None:
    """The number in `file`; None where there is none, as in ``max``."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None
