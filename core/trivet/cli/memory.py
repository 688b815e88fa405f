"""``trivet memory``: what a model would take, from its config.json alone, without torch; or what it takes, loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import click

from trivet.capacity.device import DeviceProfile, shipped_profiles
from trivet.capacity.limits import Limits
from trivet.cli.debug import debug_option
from trivet.cli.limits import filled_limits, limits_text, loading_arguments
from trivet.cli.progress import loading_bar
from trivet.cli.sizes import size_option
from trivet.cli.sizing import partial_arguments, sizing_options
from trivet.errors import ConfigError, MemoryBudgetError

if TYPE_CHECKING:
    from trivet.reservation import MemoryLedger


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "--device-memory",
    callback=size_option,
    metavar="SIZE",
    help="Memory of the device, as in 80GiB; that of its profile, or this machine's, by default.",
)
@click.option(
    "--device",
    metavar="NAME",
    help="What is planned for: this machine's CPU (cpu) by default, or a GPU by its short name, as in h200. With "
    "--live a device of this machine: cpu, cuda or cuda:1; CUDA if there is one by default.",
)
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
    """Plan the memory of MODEL, a directory with a config.json or the name of a shipped model.

    Limits that are not given are the device's and the model's own; the first lines say which were planned for.
    """
    if live:
        if device_memory is not None:
            raise click.UsageError("--device-memory is for planning; --live takes the memory that is there")
        return _live(model, as_json, loading_arguments(model, {"device": device, "weights": weights, **sizing}))
    if weights is not None:
        raise click.UsageError("--weights is for --live; a plan needs none")
    from trivet import plan_memory

    profile = _profile(device, device_memory)
    arguments = partial_arguments(sizing)
    limits = filled_limits(model, profile.kind, arguments.pop("limits", {}))
    with _ledger_in_lines(as_json):
        ledger = plan_memory(model, device=profile, limits=limits, **arguments)
    document = ledger.as_json() | _sizes(ledger, limits, profile)
    whose = "" if device is not None else ", this machine's; --device NAME plans for a GPU"
    click.echo(json.dumps(document) if as_json else _text(ledger.table(), document, limits, f"{profile.name}{whose}"))
    return 0


def _live(model: str, as_json: bool, arguments: dict[str, Any]) -> int:
    """Load, serve the longest step, measure, print; exit code 1 if an owned line is not what was planned."""
    from trivet import Runtime
    from trivet.runtime.live import LiveMemory, serve_longest_step

    with _ledger_in_lines(as_json), loading_bar(model) as progress:
        runtime = Runtime.load(model, autostart=False, progress=progress, **arguments)
    with runtime:
        serve_longest_step(runtime)
        found = LiveMemory.of(runtime)
        capacity = runtime._engine.blueprint.capacity
    limits, profile = capacity.limits, capacity.device
    document = found.as_json() | _sizes(found.ledger, limits, profile)
    click.echo(json.dumps(document) if as_json else _text(found.table(), document, limits, profile.name))
    for name, (planned, held) in found.differing.items():
        click.echo(f"trivet: {name} was planned with {planned} bytes and holds {held}", err=True)
    return 1 if found.differing else 0


def _profile(device: str | None, memory_bytes: int | None) -> DeviceProfile:
    if device is not None and device.partition(":")[0] == "cuda":
        raise ConfigError(
            f"--device {device} is a device of this machine, which --live loads the model on; a plan is for a GPU by "
            f"its short name: {', '.join(sorted(shipped_profiles()))}"
        )
    return DeviceProfile.named("cpu" if device is None else device, memory_bytes)


@contextmanager
def _ledger_in_lines(as_json: bool) -> Iterator[None]:
    """Put the ledger of a budget that is too small where the plan would be, line by line; the error is one line."""
    try:
        yield
    except MemoryBudgetError as error:
        what, _, table = str(error).partition("\n")
        if not table or as_json:
            raise
        click.echo(table)
        raise MemoryBudgetError(what) from error


def _sizes(ledger: MemoryLedger, limits: Limits, profile: DeviceProfile) -> dict[str, object]:
    """What stands in JSON beside the ledger's own."""
    return {
        "owned": [line.name for line in ledger.items if line.owned],
        "budget_bytes": ledger.budget_bytes,
        "device": {"name": profile.name, "memory_bytes": profile.memory_bytes},
        "limits": attrs.asdict(limits),
        "kv_tokens": ledger.kv_pages * limits.page_size,
        "full_length_requests": ledger.kv_pages // limits.pages_per_request,
    }


def _text(table: str, document: Mapping[str, object], limits: Limits, device: str) -> str:
    """The table between what it is for and what its pages hold, as `document` has them."""
    held = f"{document['kv_tokens']} tokens, {document['full_length_requests']} whole contexts of {limits.max_context}"
    return f"device  {device}\nlimits  {limits_text(limits)}\n\n{table}\n\n{document['kv_pages']} KV pages: {held}"
