"""``trivet bench``: measure the runtime, print a short table, and keep every raw sample in a record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trivet.bench.arms import ARMS
from trivet.cli.debug import debug_option
from trivet.cli.limits import arguments_elsewhere
from trivet.cli.numbers import counts
from trivet.cli.recorded import command_line, options_of
from trivet.cli.sizing import COUNT, DEFAULT_MODEL, partial_arguments, sizing_options
from trivet.errors import TrivetError

if TYPE_CHECKING:
    from trivet.bench.prompts import Lengths

Command = TypeVar("Command", bound=Callable[..., Any])

PEERS = ("transformers",)


def _arms(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Callback of an option whose value is arms separated by commas."""
    choice = click.Choice(ARMS)
    return tuple(dict.fromkeys(choice.convert(part.strip(), parameter, context) for part in value.split(",")))


def _lengths(context: click.Context, parameter: click.Parameter, value: str) -> Lengths:
    """Callback of an option whose value is a length in tokens, or a range of lengths."""
    from trivet.bench.prompts import Lengths

    try:
        return Lengths.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def _batches_option(command: Command) -> Command:
    option = click.option(
        "--batch",
        "batches",
        callback=counts(),
        metavar="N,...",
        default="1,16",
        show_default=True,
        help="Requests that decode at once.",
    )
    return option(command)


def _out_option(command: Command) -> Command:
    option = click.option(
        "--out",
        type=click.Path(path_type=Path),
        metavar="DIR",
        default="records",
        show_default=True,
        help="Folder for the record, JSON; made if it is not there.",
    )
    return option(command)


def _seed_option(command: Command) -> Command:
    return click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and drawn lengths.")(command)


def _runtime_options(command: Command) -> Command:
    """What is served, and how large it may become."""
    options = [
        click.option("--model", default=DEFAULT_MODEL, show_default=True, metavar="DIR|NAME", help="What to serve."),
        click.option("--device", metavar="NAME", help="cpu, cuda or cuda:1; CUDA if there is one by default."),
        click.option("--weights", type=click.Choice(["checkpoint", "random"]), help="Where the weights come from."),
        sizing_options,
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def bench() -> None:
    """Measure the runtime. Each command prints a short table and writes one record with every raw sample."""


@bench.command()
@_batches_option
@click.option("--context", type=COUNT, default=128, show_default=True, help="Tokens of each prompt.")
@click.option("--iterations", type=COUNT, default=100, show_default=True, help="Decode steps in a segment.")
@click.option("--pairs", type=COUNT, default=5, show_default=True, help="Segments of each arm, or runs of each side.")
@click.option(
    "--arm",
    "arms",
    callback=_arms,
    metavar="ARM,...",
    default=",".join(ARMS),
    show_default=True,
    help="The plan: owned and refilled, fresh in every step (no CUDA graphs then), or both in interleaved pairs.",
)
@click.option("--peer", type=click.Choice(PEERS), help="Compare generation with a peer instead.")
@click.option("--new-tokens", type=COUNT, default=64, show_default=True, help="With --peer: of the single request.")
@click.option("--requests", type=COUNT, default=32, show_default=True, help="With --peer: of mixed lengths.")
@click.option(
    "--mixed-prompt",
    callback=_lengths,
    metavar="N|N-N",
    default="8-128",
    show_default=True,
    help="With --peer: their prompts.",
)
@click.option(
    "--mixed-new",
    callback=_lengths,
    metavar="N|N-N",
    default="16-96",
    show_default=True,
    help="With --peer: their new tokens.",
)
@_seed_option
@_runtime_options
@_out_option
@debug_option
def decode(
    batches: tuple[int, ...],
    context: int,
    iterations: int,
    pairs: int,
    arms: tuple[Any, ...],
    peer: str | None,
    new_tokens: int,
    requests: int,
    mixed_prompt: Lengths,
    mixed_new: Lengths,
    seed: int,
    model: str,
    out: Path,
    **runtime: Any,
) -> int:
    """Time decode steps; compare an owned plan with a fresh one, or the runtime with transformers."""
    load = partial_arguments(runtime)
    if peer is None:
        from trivet.bench.decode import DecodeSettings, bench_decode

        steps = DecodeSettings(model, batches, context, iterations, pairs, arms, seed, load)
        name = "decode-arms" if len(arms) > 1 else "decode"
        return _run(name, lambda: bench_decode(steps, click.echo), out)
    from trivet.bench.peer import PeerSettings, bench_peer

    sides = PeerSettings(model, pairs, context, new_tokens, requests, mixed_prompt, mixed_new, seed, load)
    return _run("decode-peer", lambda: bench_peer(sides, click.echo), out)


@bench.command()
@_batches_option
@click.option("--prompt-tokens", type=COUNT, default=128, show_default=True, help="Of each request.")
@click.option("--new-tokens", type=COUNT, default=64, show_default=True, help="Of each request.")
@click.option("--repeats", type=COUNT, default=3, show_default=True, help="Calls of each kind.")
@click.option("--many", type=click.IntRange(min=0), default=0, help="Requests of one call for throughput.")
@click.option("--many-new-tokens", type=COUNT, default=128, show_default=True, help="With --many: new tokens.")
@click.option(
    "--ttft",
    "long_prompts",
    callback=counts(or_none=True),
    metavar="N,...",
    default="",
    help="Prompts to time alone.",
)
@click.option(
    "--warm-ttft",
    "cached_prefixes",
    callback=counts(or_none=True),
    metavar="N,...",
    default="",
    help="Prefixes to keep in the prefix cache, and to time prompts behind.",
)
@click.option("--kernels", is_flag=True, help="Break a decode step down by kernel, and each of --ttft (CUDA).")
@_seed_option
@_runtime_options
@_out_option
@debug_option
def generate(
    batches: tuple[int, ...],
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    many: int,
    many_new_tokens: int,
    long_prompts: tuple[int, ...],
    cached_prefixes: tuple[int, ...],
    kernels: bool,
    seed: int,
    model: str,
    out: Path,
    **runtime: Any,
) -> int:
    """Time Runtime.generate: per output token by batch, throughput, time to first token."""
    from trivet.bench.generate import GenerateSettings, bench_generate

    settings = GenerateSettings(
        model=model,
        batches=batches,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        many=many,
        many_new_tokens=many_new_tokens,
        long_prompts=long_prompts,
        cached_prefixes=cached_prefixes,
        kernels=kernels,
        seed=seed,
        load=partial_arguments(runtime),
    )
    return _run("generate", lambda: bench_generate(settings, click.echo), out)


@bench.command()
@click.option("--requests", type=COUNT, default=32, show_default=True, help="How many requests.")
@click.option(
    "--prompt-tokens",
    callback=_lengths,
    metavar="N|N-N",
    default="16-256",
    show_default=True,
    help="Length, or a range of them.",
)
@click.option(
    "--new-tokens",
    callback=_lengths,
    metavar="N|N-N",
    default="64",
    show_default=True,
    help="Length, or a range of them.",
)
@click.option("--concurrency", type=COUNT, help="Most requests that are open at once; all of them by default.")
@_seed_option
@_runtime_options
@_out_option
@debug_option
def serve(
    requests: int,
    prompt_tokens: Lengths,
    new_tokens: Lengths,
    concurrency: int | None,
    seed: int,
    model: str,
    out: Path,
    **runtime: Any,
) -> int:
    """Serve many streaming clients at once: throughput, time to first token, inter-token latency."""
    from trivet.bench.serve import ServeSettings, bench_serve

    load = partial_arguments(runtime)
    settings = ServeSettings(model, requests, prompt_tokens, new_tokens, concurrency, seed, load)
    return _run("serve", lambda: bench_serve(settings, click.echo), out)


@bench.command()
@click.option("--cold", type=COUNT, default=1, show_default=True, help="Starts without compiled code.")
@click.option("--warm", type=COUNT, default=3, show_default=True, help="Starts that find it.")
@_runtime_options
@_out_option
@debug_option
def startup(cold: int, warm: int, model: str, out: Path, **runtime: Any) -> int:
    """Time from the start of a process to its first token."""
    from trivet.bench.startup import StartupSettings, bench_startup

    settings = StartupSettings(model, cold, warm, arguments_elsewhere(model, runtime))
    return _run("startup", lambda: bench_startup(settings, click.echo), out)


@bench.command()
@click.option(
    "--requests",
    callback=counts(),
    metavar="N,...",
    default="1,64,256,1024",
    show_default=True,
    help="Requests that run at once.",
)
@click.option(
    "--cached-pages",
    callback=counts(),
    metavar="N,...",
    default="1000,10000,100000",
    show_default=True,
    help="In the prefix cache.",
)
@click.option("--page-size", type=COUNT, default=16, show_default=True, help="Tokens per page of the KV cache.")
@click.option("--steps", type=COUNT, default=300, show_default=True, help="Steps timed in each combination.")
@_seed_option
@_out_option
@debug_option
def host(
    requests: tuple[int, ...],
    cached_pages: tuple[int, ...],
    page_size: int,
    steps: int,
    seed: int,
    out: Path,
) -> int:
    """Time the runtime's own work per step, with a model that computes nothing."""
    from trivet.bench.host import HostSettings, bench_host

    settings = HostSettings(requests, cached_pages, page_size, steps, seed)
    return _run("host", lambda: bench_host(settings, click.echo), out)


def _run(name: str, measure: Callable[[], dict[str, Any]], out: Path) -> int:
    """Measure, and keep the record, also of what stands before a ``"failure"`` in it, which is then raised."""
    from trivet.bench.record import Record, make_folder, now

    context = click.get_current_context()
    started = now()
    make_folder(out)  # before time is spent on what cannot be kept
    results = measure()
    path = Record.of(name, command_line(context), options_of(context), results, started).write(out)
    click.echo(f"record: {path}")
    if "failure" in results:
        raise TrivetError(results["failure"])
    return 0
