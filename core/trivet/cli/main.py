"""The group of commands, and how each way of failing ends: one line on stderr and an exit code."""

from __future__ import annotations

from collections.abc import Sequence

import click

from trivet import __version__
from trivet.cli.bench import bench
from trivet.cli.conform import conform
from trivet.cli.debug import Debug, debug_option
from trivet.cli.doctor import doctor
from trivet.cli.gate import gate
from trivet.cli.generate import generate
from trivet.cli.log import warnings_on_stderr
from trivet.cli.memory import memory
from trivet.cli.new_plugin import new_plugin
from trivet.cli.plugins import plugins
from trivet.cli.warmup import warmup
from trivet.errors import MemoryBudgetError, TrivetError

SUCCESS, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


@click.group()
@click.version_option(__version__, message="%(prog)s %(version)s")
@debug_option
def trivet() -> None:
    """Run large language models, plan their memory, and look after the plugins that serve them."""


for _command in (bench, conform, doctor, gate, generate, memory, new_plugin, plugins, warmup):
    trivet.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 success, 1 a failed check or request, 2 wrong usage.

    Args:
        arguments: without the program's name; None: those of the process.
    """
    debug = Debug()
    try:
        with warnings_on_stderr(debug):
            result = trivet.main(arguments, prog_name="trivet", standalone_mode=False, obj=debug)
        return result if isinstance(result, int) else SUCCESS
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return WRONG_USAGE
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "trivet"
        return _fail(debug, WRONG_USAGE, f"{where}: {error.format_message()} (see {where} --help)")
    except click.ClickException as error:
        return _fail(debug, FAILED, f"trivet: {error.format_message()}")
    except click.Abort:
        return _fail(debug, INTERRUPTED, "trivet: interrupted")
    except MemoryBudgetError as error:
        # The ledger behind its first line is no part of one; `trivet memory` prints it.
        what, _, table = str(error).partition("\n")
        hint = "; trivet memory with the same options prints the ledger" if table else ""
        return _fail(debug, FAILED, f"trivet: {type(error).__name__}: {what.rstrip('.')}{hint}")
    except TrivetError as error:
        return _fail(debug, FAILED, f"trivet: {type(error).__name__}: {error}")
    except Exception as error:
        advice = "this is a bug in Trivet or in a plugin; --debug shows where"
        return _fail(debug, FAILED, f"trivet: {type(error).__name__}: {error}; {advice}")


def _fail(debug: Debug, code: int, message: str) -> int:
    """Report the exception being handled on one line, after its traceback if that was asked for."""
    debug.show_traceback()
    click.echo("; ".join(" ".join(line.split()) for line in message.splitlines() if line.strip()), err=True)
    return code
