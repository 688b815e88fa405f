"""``trivet warmup``: build a model's kernels before it serves."""

from __future__ import annotations

from typing import Any

import click

from trivet.cli.debug import debug_option
from trivet.cli.limits import loading_arguments
from trivet.cli.sizing import sizing_options


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--device", metavar="NAME", help="cpu, cuda or cuda:1; CUDA if there is one by default.")
@click.option(
    "--weights",
    type=click.Choice(["checkpoint", "random"]),
    default="random",
    show_default=True,
    help="Only shapes count for what is built.",
)
@sizing_options
@debug_option
def warmup(model: str, device: str | None, weights: str, **sizing: Any) -> int:
    """Build and cache the kernels that serving MODEL takes; the next start finds them."""
    from trivet.runtime.warmup import warm_up

    arguments = loading_arguments(model, {"device": device, "weights": weights, **sizing})
    built = warm_up(model, click.echo, **arguments)
    click.echo(f"ready after {sum(one.seconds for one in built):.1f} s")
    return 0
