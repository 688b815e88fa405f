"""The command that a record keeps asks for what was asked for."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest

from trivet.cli.main import trivet
from trivet.cli.recorded import command_line, options_of

TYPED = [
    "trivet bench generate --batch 1,16 --new-tokens 8 --ttft 4096,8192 --kernels --numeric-policy pinned --seed 3",
    "trivet bench serve --prompt-tokens 16-256 --new-tokens 64 --model tiny-qwen35 --memory-fraction 0.5",
    "trivet bench decode --arm owned,fresh --pairs 2 --dtype float32",
    "trivet bench host --requests 1,2 --cached-pages 10",
    "trivet gate tiny-qwen3 --long --no-controls --batch 3,5 --pass warm --pass mixed --json",
]


def parsed(line: str, *further: str) -> click.Context:
    """The context of the command in `line`."""
    name, *words = [*shlex.split(line), *further]
    command: click.Command = trivet
    context = click.Context(command, info_name=name)
    while isinstance(command, click.Group):
        name = words.pop(0)
        command = command.commands[name]
        group = isinstance(command, click.Group)
        context = command.make_context(name, [] if group else words, parent=context, resilient_parsing=group)
    return context


@pytest.mark.parametrize("line", TYPED)
def test_the_kept_command_asks_for_what_was_typed(line: str, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "records"))
    context = parsed(line, *out)
    kept = command_line(context)
    assert sorted(shlex.split(kept)) == sorted(shlex.split(line))
    assert options_of(parsed(kept, *out)) == options_of(context)
    assert str(tmp_path) not in kept + str(options_of(context))


def test_of_a_checkpoint_only_the_name_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    context = parsed(f"trivet gate {tmp_path / 'mine'} --out {tmp_path}")
    assert command_line(context) == "trivet gate mine" and options_of(context)["checkpoint"] == "mine"
