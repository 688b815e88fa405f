"""``--debug``: show the traceback of what fails. Accepted before and after a command's name."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


class Debug:
    """Whether this invocation was asked for tracebacks."""

    def __init__(self) -> None:
        self.wanted = False

    def show_traceback(self) -> None:
        """Print the traceback of the exception being handled on stderr, if wanted."""
        if self.wanted:
            click.echo(traceback.format_exc(), err=True, nl=False)


def debug_option(command: Command) -> Command:
    """Add ``--debug`` to a command or group."""

    def remember(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
        debug = context.find_object(Debug)
        if wanted and debug is not None:
            debug.wanted = True

    return click.option(
        "--debug",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=remember,
        help="Show the traceback of an error.",
    )(command)
