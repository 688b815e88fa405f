"""``trivet memory``: what a model would take, from its config.json alone. Does not import torch."""

from __future__ import annotations

import json
from typing import Any

import click

from trivet.cli.debug import debug_option
from trivet.cli.sizes import size_option
from trivet.cli.sizing import sizing_arguments, sizing_options


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "--device-memory",
    callback=size_option,
    metavar="SIZE",
    help="Memory of the device, as in 80GiB; that of its profile by default.",
)
@click.option("--device", metavar="NAME", help="cpu, or a GPU by its short name, as in h200.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@sizing_options
@debug_option
def memory(model: str, device_memory: int | None, device: str | None, as_json: bool, **sizing: Any) -> int:
    """Plan the memory of MODEL, a directory with a config.json or the name of a shipped model."""
    from trivet import plan_memory

    arguments = sizing_arguments({"device": device, "device_memory_bytes": device_memory, **sizing})
    ledger = plan_memory(model, **arguments)
    if as_json:
        click.echo(json.dumps(ledger.as_json()))
    else:
        click.echo(f"{ledger.table()}\n\n{ledger.kv_pages} KV pages")
    return 0
