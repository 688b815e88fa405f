"""The command line and the options of a command, as a record of what it found keeps them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

LEFT_OUT = frozenset({"out", "debug"})
"""Options that change nothing about results: where they go, and how errors are shown."""

DIRECTORIES = frozenset({"model", "checkpoint"})
"""Of these, only the last name of a directory is kept."""


def command_line(context: click.Context) -> str:
    """What was typed, for a shell: parsed again, it asks for the same."""
    words = context.command_path.split()
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in LEFT_OUT or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if not isinstance(parameter, click.Option):
            words.append(_text(name, value))
        elif parameter.is_flag:
            words.append(parameter.opts[0] if value else (parameter.secondary_opts or parameter.opts)[0])
        else:
            for each in value if parameter.multiple else (value,):
                words += [parameter.opts[0], _text(name, each)]
    return shlex.join(words)


def options_of(context: click.Context) -> dict[str, Any]:
    """All options by name, as JSON has them."""
    return {name: _kept(name, value) for name, value in context.params.items() if name not in LEFT_OUT}


def _kept(name: str, value: Any) -> Any:
    if name in DIRECTORIES:
        return Path(value).resolve().name if Path(value).is_dir() else value
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def _text(name: str, value: Any) -> str:
    kept = _kept(name, value)
    return ",".join(map(str, kept)) if isinstance(kept, list) else str(kept)
