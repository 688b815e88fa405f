"""``trivet gate``: hold the runtime against transformers on the same tensors, and against faults put in on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from trivet.cli.debug import debug_option
from trivet.cli.numbers import counts
from trivet.cli.recorded import command_line, options_of
from trivet.cli.sizing import partial_arguments, sizing_options
from trivet.gate.settings import LEAST_NEW_TOKENS, GateSettings


@click.command()
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option("--weights", type=click.Choice(["checkpoint", "random"]), help="Where the weights come from.")
@click.option("--device", metavar="NAME", help="cpu, cuda or cuda:1; CUDA if there is one by default.")
@click.option("--eager", is_flag=True, help="Without CUDA graphs.")
@click.option(
    "--reference",
    type=click.Choice(["tensors", "files"]),
    default="tensors",
    show_default=True,
    help="transformers over the runtime's own tensors, or over the checkpoint's files.",
)
@click.option(
    "--batch",
    "batches",
    callback=counts(least=2),
    metavar="N,...",
    default="9,17",
    show_default=True,
    help="Requests served at once: one more than a bucket of CUDA graphs.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(min=LEAST_NEW_TOKENS),
    default=12,
    show_default=True,
    help="Of each request.",
)
@click.option("--long", "long_prompts", is_flag=True, help="Prompts of 4,097 and 8,192 tokens too, and faults in one.")
@click.option(
    "--pass", "passes", multiple=True, metavar="NAME", help="Run this pass alone; may be given several times."
)
@click.option("--controls/--no-controls", default=True, show_default=True, help="Put faults in, which must be caught.")
@click.option("--floor/--no-floor", default=True, show_default=True, help="Measure the rounding of the dtype too.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; the tables go to stderr.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder for the record, JSON.")
@sizing_options
@debug_option
def gate(
    checkpoint: str,
    reference: str,
    batches: tuple[int, ...],
    new_tokens: int,
    long_prompts: bool,
    passes: tuple[str, ...],
    controls: bool,
    floor: bool,
    seed: int,
    as_json: bool,
    out: Path | None,
    eager: bool,
    **runtime: Any,
) -> int:
    """Serve CHECKPOINT in every way, and hold each log-probability against transformers on the same tensors.

    CHECKPOINT is a directory, or the name of a shipped model or geometry. Exit code 0 only if every pass keeps the
    bounds and every fault that is put in breaks them.
    """
    from trivet.bench.record import Record, make_folder, now
    from trivet.gate.passes import passes_of
    from trivet.gate.run import run_gate

    load = partial_arguments(runtime) | ({"cuda_graphs": False} if eager else {})
    settings = GateSettings(
        checkpoint, load, reference, batches, new_tokens, long_prompts, passes, controls, floor, seed
    )
    unknown = [name for name in passes if name not in passes_of(settings)]
    if unknown:
        raise click.UsageError(f"no pass is called {unknown[0]!r}; there are {', '.join(passes_of(settings))}")
    context = click.get_current_context()
    started = now()
    if out is not None:
        make_folder(out)  # before time is spent on what cannot be kept

    def say(text: str) -> None:
        click.echo(text, err=as_json)

    results = run_gate(settings, say)
    if out is not None:
        path = Record.of("gate", command_line(context), options_of(context), results, started).write(out)
        say(f"record: {path}")
    if as_json:
        click.echo(json.dumps(results, separators=(",", ":")))
    return 0 if results["passed"] else 1
