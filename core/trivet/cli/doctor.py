"""``trivet doctor``: every plugin that is installed, what is wrong with it and what to do; and the environment."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import Any

import attrs
import click

from trivet.cli.debug import debug_option
from trivet.cli.environment import Part, environment
from trivet.errors import PluginError
from trivet.plugin.family import ModelFamily
from trivet.plugin.groups import FAMILIES
from trivet.plugin.hookspecs import PROJECT
from trivet.plugin.manager import PluginManager
from trivet.plugin.record import PluginRecord
from trivet.plugin.selection import VARIABLE

WRONG = ("failed", "incompatible")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@debug_option
def doctor(as_json: bool) -> int:
    """Say whether plugins and environment are sound. Exit code 1 if a plugin is wrong.

    Only plugins that are meant for this Trivet are imported, and of a family also what builds its model. A missing
    optional part of the environment is a note.
    """
    with _stdout_is_ours():
        manager = PluginManager.discover()
        manager.load_all()
        plugins = [_examined(record, manager) for record in manager.records]
        parts = environment()
    notes = [f"{VARIABLE} names {selector!r}, but no plugin is called that" for selector in manager.unmatched]
    wrong = [plugin for plugin in plugins if plugin["status"] in WRONG]
    if as_json:
        report = {
            "ok": not wrong,
            "plugins": plugins,
            "environment": [attrs.asdict(part) for part in parts],
            "notes": notes,
        }
        click.echo(json.dumps(report))
    else:
        click.echo("\n".join([*_plugin_lines(plugins), "", *_part_lines(parts), *(f"note: {note}" for note in notes)]))
        count = f"{len(wrong)} of {len(plugins)} plugins wrong" if wrong else f"{len(plugins)} plugins, none wrong"
        click.echo(f"\n{count}")
    return 1 if wrong else 0


@contextmanager
def _stdout_is_ours() -> Iterator[None]:
    """Send to stderr what is printed meanwhile, also by compiled code: plugins and libraries greet at import."""
    sys.stdout.flush()
    try:
        ours, errors = sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError):  # no files stand behind them
        with redirect_stdout(sys.stderr):
            yield
        return
    kept = os.dup(ours)
    os.dup2(errors, ours)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, ours)
        os.close(kept)


def _examined(record: PluginRecord, manager: PluginManager) -> dict[str, Any]:
    """A record as data, with the families that it brings and the command that mends or removes it."""
    version = re.search(r"\.v(\d+)$", record.group)
    families = []
    if record.status == "loaded" and record.group == FAMILIES.name:
        family = manager.family_for(record.name)
        families.append(
            {
                "name": family.name,
                "model_types": list(family.model_types),
                "capabilities": attrs.asdict(family.capabilities),
            }
        )
        error = _unbuildable(family)
        if error is not None:
            record = attrs.evolve(record, status="failed", phase="validation", error=error)
    return {
        **attrs.asdict(record),
        # Loaded to be examined; a person asks whether it is ready.
        "status": "ready" if record.status == "loaded" else record.status,
        "api": int(version[1]) if version else None,
        "families": families,
        "remedy": _remedy(record),
    }


def _unbuildable(family: ModelFamily) -> str | None:
    """Why what builds the family's model cannot be had, which loading a plugin does not try; None if it can."""
    if find_spec("torch") is None:
        return None  # nothing runs, as the environment's lines say
    try:
        family.builder()
    except PluginError as error:
        return " ".join(str(error).split())
    return None


def _remedy(record: PluginRecord) -> str | None:
    """The command that mends a plugin or takes it out of the way."""
    name = record.distribution
    if record.status == "blocked":
        return f"unset {VARIABLE}, or take the plugin's name out of it"
    if record.status == "incompatible":
        return f"pip install --upgrade {name}, or pip uninstall {name}"
    if record.status != "failed":
        return None
    if record.phase == "metadata":
        if name == PROJECT:  # its own entry points are right: somebody else claims the same name
            return f"uninstall the other distribution that the error names, or set {VARIABLE}=-OTHER:{record.name}"
        return f"pip uninstall {name}"
    if record.phase in ("import", "validation") and (missing := _missing_module(record)):
        return f"pip install {missing}, or pip uninstall {name}"
    if record.phase == "import":
        return f"pip install --force-reinstall {name}, or pip uninstall {name}"
    return f"mend the source of {name} (or tell its author), or pip uninstall {name}"


def _missing_module(record: PluginRecord) -> str | None:
    """The top-level module that an import lacks, unless that is the plugin's own."""
    found = (
        re.search(r"No module named '(\w+)", record.error or "") if record.phase in ("import", "validation") else None
    )
    own = record.target.partition(":")[0].partition(".")[0]
    return found[1] if found and found[1] != own else None


def _plugin_lines(plugins: list[dict[str, Any]]) -> list[str]:
    if not plugins:
        return ["no plugins are installed"]
    rows = [("NAME", "STATUS", "API", "FAMILY", "DISTRIBUTION")]
    for plugin in plugins:
        status = f"{plugin['status']} ({plugin['phase']})" if plugin["phase"] else plugin["status"]
        api = f"v{plugin['api']}" if plugin["api"] is not None else "-"
        families = ", ".join(family["name"] for family in plugin["families"]) or "-"
        origin = f"{plugin['distribution']} {plugin['version']}".strip()
        rows.append((plugin["name"], status, api, families, origin))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for line, plugin in enumerate(plugins, start=1):
        if plugin["error"]:
            lines[line] += f"\n    {plugin['group']}: {plugin['error']}\n    remedy: {plugin['remedy']}"
    return lines


def _part_lines(parts: tuple[Part, ...]) -> list[str]:
    width = max(len(part.name) for part in parts)
    return [f"{part.name:<{width}}  {_said_of(part)}" for part in parts]


def _said_of(part: Part) -> str:
    if part.found is None:
        return f"missing: {part.note}"
    return f"{part.found}: {part.note}" if part.note else part.found
