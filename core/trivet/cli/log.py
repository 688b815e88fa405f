"""What the runtime logs while a command runs: warnings as single lines on stderr, tracebacks only with ``--debug``."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click

from trivet.cli.debug import Debug

TOLD_BY_COMMANDS = ("trivet.engine", "trivet.runtime")
"""Loggers of what becomes of requests, which a command reports by itself, on the one line of its error."""


@contextmanager
def warnings_on_stderr(debug: Debug) -> Iterator[None]:
    """Show warnings of the loggers below ``trivet`` for as long as a command runs."""
    handler = _Lines(debug)
    logger = logging.getLogger("trivet")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Lines(logging.Handler):
    """A line for each record. Without any handler Python would print tracebacks too."""

    def __init__(self, debug: Debug) -> None:
        super().__init__(logging.WARNING)
        self._debug = debug

    def emit(self, record: logging.LogRecord) -> None:
        """Write `record` to stderr."""
        if self._debug.wanted and record.exc_info:
            click.echo("".join(traceback.format_exception(*record.exc_info)), err=True, nl=False)
        elif record.name in TOLD_BY_COMMANDS:
            return
        click.echo(f"trivet: {' '.join(record.getMessage().split())}", err=True)
