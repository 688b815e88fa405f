"""``trivet plugins``: every installed plugin, which of them work, and what is wrong with the others."""

from __future__ import annotations

import json

import attrs
import click

from trivet.cli.debug import debug_option
from trivet.plugin.manager import PluginManager
from trivet.plugin.record import PluginRecord
from trivet.plugin.selection import VARIABLE


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@debug_option
def plugins(as_json: bool) -> int:
    """List the installed plugins. Imports each that may be used, so that one that fails is told from one that works."""
    manager = PluginManager.discover()
    records = manager.load_all()
    for selector in manager.unmatched:
        click.echo(f"trivet: {VARIABLE} names {selector!r}, but no plugin is called that", err=True)
    if as_json:
        click.echo(json.dumps({"plugins": [attrs.asdict(record) for record in records]}))
    else:
        click.echo(_table(records) if records else "no plugins are installed")
    return 0


def _table(records: tuple[PluginRecord, ...]) -> str:
    rows = [("NAME", "STATUS", "GROUP", "DISTRIBUTION")]
    rows += [(record.name, _status(record), record.group, record.origin) for record in records]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for line, record in enumerate(records, start=1):
        if record.error:
            lines[line] += f"\n    {record.error}"
    return "\n".join(lines)


def _status(record: PluginRecord) -> str:
    return f"{record.status} ({record.phase})" if record.phase else record.status
