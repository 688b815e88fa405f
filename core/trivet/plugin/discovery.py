"""Find the plugins that are installed, from metadata alone: nothing of theirs is imported."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata

from attrs import evolve

from trivet.plugin.groups import API_VERSION, GROUPS, near_miss_of, other_version_of
from trivet.plugin.record import PluginRecord
from trivet.plugin.selection import Selection

_METADATA_FILE = "entry_points.txt"
_TARGET = re.compile(r"\w+(\.\w+)*(:\w+(\.\w+)*)?")
_EXTRAS = re.compile(r"\s*\[.*\]$")
"""Old metadata may name extras behind the target; nothing reads them."""


def find_plugins(selection: Selection, path: Sequence[str] | None = None) -> list[PluginRecord]:
    """A record for each entry point that has to do with Trivet, ordered by group, name and distribution.

    Args:
        selection: what the operator allows.
        path: directories to look in; None: ``sys.path``.
    """
    records = [record for distribution in _distributions(path) for record in _read(distribution)]
    records.sort(key=lambda record: (record.group, record.name, record.distribution))
    return refuse_rivals([_select(record, selection) for record in records])


def refuse_rivals(records: Iterable[PluginRecord]) -> list[PluginRecord]:
    """Fail each ready record whose name another claims too, where a group's names are exclusive."""
    records = list(records)
    claims: dict[tuple[str, str], list[PluginRecord]] = {}
    for record in records:
        if record.status == "ready" and GROUPS[record.group].exclusive:
            claims.setdefault((record.group, record.name), []).append(record)
    return [_refuse_rival(record, claims.get((record.group, record.name), [])) for record in records]


def _refuse_rival(record: PluginRecord, claims: Sequence[PluginRecord]) -> PluginRecord:
    if record.status != "ready" or len(claims) < 2:
        return record
    rivals = " and by ".join(f"{claim.origin} ({claim.target})" for claim in claims)
    return evolve(
        record,
        status="failed",
        phase="metadata",
        error=f"{record.name!r} in group {record.group} is claimed by {rivals}: uninstall all but one, "
        f"or block the others, as in TRIVET_PLUGINS=-{claims[-1].distribution}:{record.name}",
    )


def _select(record: PluginRecord, selection: Selection) -> PluginRecord:
    reason = selection.why_blocked(record.name, record.distribution)
    return record if reason is None else evolve(record, status="blocked", phase=None, error=reason)


def _distributions(path: Sequence[str] | None) -> Iterator[metadata.Distribution]:
    # A folder that stands on the path twice (the current one, with ``python -m``) is no second copy of what it holds.
    searched = list(dict.fromkeys(os.path.abspath(folder) for folder in (sys.path if path is None else path)))
    for distribution in metadata.distributions(path=searched):
        text = _entry_points_text(distribution)
        if "trivet" in text.casefold() and not _shadowed(distribution, text, searched):
            yield distribution


def _shadowed(distribution: metadata.Distribution, text: str, path: list[str]) -> bool:
    """Whether another copy of the distribution comes first on the path: what is imported is that one's."""
    name = _header(distribution, "Name")
    first = next(iter(metadata.distributions(name=name, path=path)), None) if name else None
    if first is None:
        return False
    return first.locate_file("") != distribution.locate_file("") or _entry_points_text(first) != text


def _entry_points_text(distribution: metadata.Distribution) -> str:
    try:
        return distribution.read_text(_METADATA_FILE) or ""
    except UnicodeDecodeError as error:
        return error.object.decode(errors="replace")  # enough to tell whether it speaks of Trivet
    except OSError:
        return ""


def _header(distribution: metadata.Distribution, header: str) -> str:
    # A damaged METADATA file lacks the header or raises, by version of Python.
    try:
        headers = distribution.metadata
        if header in headers:
            return headers[header]
    except Exception:
        pass
    return ""


def _read(distribution: metadata.Distribution) -> Iterator[PluginRecord]:
    name = _header(distribution, "Name") or str(distribution.locate_file(""))
    version = _header(distribution, "Version")
    try:
        entry_points = [(e.group, e.name, e.value) for e in distribution.entry_points]
    except Exception as error:
        yield PluginRecord(
            name=name,
            group="",
            distribution=name,
            version=version,
            target="",
            status="failed",
            phase="metadata",
            error=f"{_METADATA_FILE} cannot be read ({type(error).__name__}: {error}): reinstall it",
        )
        return
    served = {(group, entry) for group, entry, _ in entry_points if group in GROUPS}
    for group, entry, target in entry_points:
        record = PluginRecord(entry, group, name, version, _EXTRAS.sub("", target))
        other = other_version_of(group)
        if group in GROUPS:
            yield _check_target(record)
        elif other is not None:
            if (other.name, entry) not in served:  # a distribution may offer our version beside another
                yield _incompatible(
                    record,
                    f"it offers {other.brings} for another API version, {group}; this Trivet reads "
                    f"{other.name}: install a version of {name} that offers v{API_VERSION}, or another Trivet",
                )
        elif (meant := near_miss_of(group)) is not None:
            yield _incompatible(
                record, f"Trivet reads no entry-point group {group!r}: did its author mean {meant.name!r}?"
            )


def _incompatible(record: PluginRecord, error: str) -> PluginRecord:
    return evolve(record, status="incompatible", error=error)


def _check_target(record: PluginRecord) -> PluginRecord:
    if _TARGET.fullmatch(record.target):
        return record
    return evolve(
        record,
        status="failed",
        phase="metadata",
        error=f"entry point {record.name!r} in group {record.group} is {record.target!r}, "
        "expected 'module' or 'module:attribute'",
    )
