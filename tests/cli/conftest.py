from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import frozen

from trivet.cli import main


@frozen
class Outcome:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str


@pytest.fixture
def trivet_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run one command line in this process."""

    def run(*arguments: str) -> Outcome:
        code = main(list(arguments))
        written = capsys.readouterr()
        return Outcome(code, written.out, written.err)

    return run
