"""The options that decide how large a runtime becomes. ``generate`` and ``memory`` share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from trivet.capacity.limits import Limits
from trivet.cli.numbers import Number
from trivet.dtypes import SERVED

Command = TypeVar("Command", bound=Callable[..., Any])

COUNT = click.IntRange(min=1)

_LIMITS = {
    "max_requests": "Requests that may be active at once.",
    "max_step_tokens": "Tokens that one step may compute.",
    "max_context": "Longest context of a request, prompt and new tokens together.",
    "page_size": "Tokens per page of the KV cache.",
}


def sizing_options(command: Command) -> Command:
    """Add ``--dtype``, the limits, ``--kv-pages`` and ``--memory-fraction``."""
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
            help="Part of the device's memory that the whole runtime may take.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def sizing_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `Runtime.load` and `plan_memory` for the options that were given, and no others.

    The limits that were given go into one `Limits`; none of them leaves the choice to the runtime.
    """
    given = {name: value for name, value in given.items() if value is not None}
    limits = {name: given.pop(name) for name in _LIMITS if name in given}
    return {**given, "limits": Limits(**limits)} if limits else given
