"""``trivet memory``: what a model would take, from its config.json alone, without torch; or what it takes, loaded."""

from __future__ import annotations

import json
from typing import Any

import click

from trivet.cli.debug import debug_option
from trivet.cli.progress import loading_bar
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
@click.option("--live", is_flag=True, help="Load it, and hold what it takes against the plan.")
@click.option("--weights", type=click.Choice(["checkpoint", "random"]), help="With --live: where weights come from.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@sizing_options
@debug_option
def memory(
    model: str,
    device_memory: int | None,
    device: str | None,
    live: bool,
    weights: str | None,
    as_json: bool,
    **sizing: Any,
) -> int:
    """Plan the memory of MODEL, a directory with a config.json or the name of a shipped model."""
    if live:
        if device_memory is not None:
            raise click.UsageError("--device-memory is for planning; --live takes the memory that is there")
        return _live(model, as_json, sizing_arguments({"device": device, "weights": weights, **sizing}))
    if weights is not None:
        raise click.UsageError("--weights is for --live; a plan needs none")
    from trivet import plan_memory

    arguments = sizing_arguments({"device": device, "device_memory_bytes": device_memory, **sizing})
    ledger = plan_memory(model, **arguments)
    if as_json:
        click.echo(json.dumps(ledger.as_json()))
    else:
        click.echo(f"{ledger.table()}\n\n{ledger.kv_pages} KV pages")
    return 0


def _live(model: str, as_json: bool, arguments: dict[str, Any]) -> int:
    """Load, serve the longest step, measure, print; exit code 1 if an owned line is not what was planned."""
    from trivet import Runtime
    from trivet.runtime.live import LiveMemory, serve_longest_step

    with loading_bar(model) as progress:
        runtime = Runtime.load(model, autostart=False, progress=progress, **arguments)
    with runtime:
        serve_longest_step(runtime)
        found = LiveMemory.of(runtime)
    click.echo(json.dumps(found.as_json()) if as_json else f"{found.table()}\n\n{found.ledger.kv_pages} KV pages")
    for name, (planned, held) in found.differing.items():
        click.echo(f"trivet: {name} was planned with {planned} bytes and holds {held}", err=True)
    return 1 if found.differing else 0
