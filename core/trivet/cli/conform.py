"""``trivet conform``: hold a model family to what plugins promise."""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trivet.cli.debug import debug_option
from trivet.conformance.check import TIERS
from trivet.errors import ConfigError

if TYPE_CHECKING:
    from trivet.conformance.outcome import Outcome

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("model_type", metavar="MODEL_TYPE")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    type=click.Choice(TIERS),
    help="A tier to run, instead of those that can be; may be given several times.",
)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="A real checkpoint, for the checkpoint tier.",
)
@click.option("--check", "ids", multiple=True, metavar="ID", help="Run this check alone; may be given several times.")
@click.option("--seed", type=int, default=0, show_default=True, help="Decides every drawn input.")
@click.option("--json", "json_file", type=_FILE, metavar="FILE", help="Write the record of the run.")
@click.option("--junit", "junit_file", type=_FILE, metavar="FILE", help="Write JUnit XML made from the record.")
@click.option("--markdown", "markdown_file", type=_FILE, metavar="FILE", help="Write a table made from the record.")
@click.option("--stop", is_flag=True, help="Stop at the first check that fails.")
@debug_option
def conform(
    model_type: str,
    tiers: tuple[str, ...],
    model: Path | None,
    ids: tuple[str, ...],
    seed: int,
    json_file: Path | None,
    junit_file: Path | None,
    markdown_file: Path | None,
    stop: bool,
) -> int:
    """Check the installed family that serves MODEL_TYPE. Exit code 0 only if every check was run and none failed."""
    from trivet.conformance.kit import Asked, open_kit
    from trivet.conformance.manifest import CHECKS
    from trivet.conformance.record import closing_lines, junit, make_record, markdown

    for file in (json_file, junit_file, markdown_file):
        if file is not None:
            _require_writable(file)
    unknown = [id for id in ids if id not in {check.id for check in CHECKS}]
    if unknown:
        raise click.UsageError(f"no check is called {unknown[0]!r}; the ids end with a version, as in {CHECKS[0].id!r}")
    elsewhere = [check.id for check in CHECKS if check.id in ids and tiers and check.tier not in tiers]
    if elsewhere:
        raise click.UsageError(f"check {elsewhere[0]} is in none of the tiers that were asked for ({', '.join(tiers)})")
    asked = Asked(model_type, tuple(tier for tier in TIERS if tier in tiers) or None, model, seed)
    started = time.perf_counter()
    outcomes: list[Outcome] = []
    with _quiet(), open_kit(asked) as kit:
        for check in kit.manifest():
            if ids and check.id not in ids:
                continue
            outcome = kit.run(check)
            outcomes.append(outcome)
            click.echo(_line(outcome))
            if stop and outcome.status == "failed":
                break
        command = shlex.join(["trivet", *_words(model_type, tiers, model, ids, seed)])
        record = make_record(kit, outcomes, command, time.perf_counter() - started)
        paths = [path.name for path in kit.family.decode_paths] if kit.loaded else []
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if junit_file is not None:
        junit_file.write_text(junit(record), encoding="utf-8")
    if markdown_file is not None:
        markdown_file.write_text(markdown(record), encoding="utf-8")
    click.echo("")
    if paths:
        click.echo(f"decode paths of the family, in the order in which they are asked: {', '.join(paths)}")
    for line in closing_lines(record):
        click.echo(line)
    return 0 if record["passed"] else 1


def _require_writable(file: Path) -> None:
    """Make the folder of a file that is to be written, before time is spent on what cannot be kept."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; choose another file") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """The checks raise in the middle of steps on purpose; what the runtime says of it is not the author's concern."""
    logger = logging.getLogger("trivet")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _line(outcome: Outcome) -> str:
    line = f"{outcome.status:<8}{outcome.seconds:6.2f} s  {outcome.id}"
    if outcome.failure is not None:
        line += f"\n{outcome.failure.text()}"
    return line


def _words(model_type: str, tiers: tuple[str, ...], model: Path | None, ids: tuple[str, ...], seed: int) -> list[str]:
    words = ["conform", model_type, "--seed", str(seed)]
    for tier in tiers:
        words += ["--tier", tier]
    for id in ids:
        words += ["--check", id]
    return [*words, "--model", str(model)] if model is not None else words
