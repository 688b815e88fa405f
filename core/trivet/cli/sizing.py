"""The options that decide how a runtime is built and how large it becomes, of all commands that load or plan one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from attrs import fields

from trivet.capacity.plan import NUMERIC_POLICIES
from trivet.cli.numbers import Number
from trivet.cli.sizes import size_option
from trivet.dtypes import SERVED
from trivet.runtime.options import SizingOptions

Command = TypeVar("Command", bound=Callable[..., Any])

COUNT = click.IntRange(min=1)
MEMORY_FRACTION = fields(SizingOptions).memory_fraction.default

DEFAULT_MODEL = "tiny-qwen3"
"""Of commands that need not be told what to serve: a model that ships, is trained, and runs anywhere at once."""

_LIMITS = {
    "max_requests": "Requests that may be active at once.",
    "max_step_tokens": "Tokens that one step may compute.",
    "max_context": "Longest context of a request, prompt and new tokens together.",
    "page_size": "Tokens per page of the KV cache.",
}


def sizing_options(command: Command) -> Command:
    """Add an option for each sizing argument of `Runtime.load` but ``cuda_graphs``; none has a default of its own."""
    options = [
        click.option("--dtype", type=click.Choice(SERVED), help="Dtype to serve in; the checkpoint's by default."),
        *(
            click.option(f"--{name.replace('_', '-')}", type=COUNT, help=f"Limit: {text}")
            for name, text in _LIMITS.items()
        ),
        click.option("--kv-pages", type=COUNT, help="Pages of the KV cache; what the memory leaves by default."),
        click.option(
            "--memory-fraction",
            type=Number(0, 1, min_open=True),
            help=f"Part of the device's memory that the whole runtime may take; {MEMORY_FRACTION} by default.",
        ),
        click.option(
            "--prefix-cache/--no-prefix-cache", default=None, help="Whether prompts share what they have in common."
        ),
        click.option("--snapshot-stride", type=COUNT, help="Hybrid models: tokens between prefix-cache snapshots."),
        click.option(
            "--snapshot-memory",
            "snapshot_bytes",
            callback=size_option,
            metavar="SIZE",
            help="Hybrid models: what snapshots may take, as in 8GiB; a share of what is left by default.",
        ),
        click.option("--numeric-policy", type=click.Choice(NUMERIC_POLICIES), help="Tuned by default."),
        click.option(
            "--attention",
            metavar="NAME",
            help="Attention backend: flashinfer, reference or that of a plugin; chosen by predicates by default.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def partial_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `Runtime.load` and `plan_memory` for the options that were given, and no others.

    Limits are a mapping of those that were given: the caller chooses the others.
    """
    given = {name: value for name, value in given.items() if value is not None}
    limits = {name: given.pop(name) for name in _LIMITS if name in given}
    return {**given, "limits": limits} if limits else given
