"""Pinned mirrors of device buffers, in sets: the host fills one set while copies out of the other may be queued."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trivet.layout.spec import BufferSpec

STAGING_SETS = 2
"""Sets of mirrors that a layout has."""


def mirror_name(name: str, staging_set: int) -> str:
    """Name of the pinned mirror of buffer `name` in a staging set."""
    return f"{name}.staged.{staging_set}"


def mirrors(specs: Iterable[BufferSpec]) -> Iterator[BufferSpec]:
    """The mirrors of `specs`, set by set."""
    mirrored = tuple(specs)
    for staging_set in range(STAGING_SETS):
        for spec in mirrored:
            yield BufferSpec(mirror_name(spec.name, staging_set), spec.elements, spec.dtype, pinned=True)
