from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from tests.support.runtimes import FAMILIES, make_checkpoint

from trivet.cli import main


@frozen
class Outcome:
    """What a benchmark left: its exit code, what it wrote, and its record if there is one."""

    code: int
    out: str
    err: str
    record: dict[str, Any] | None


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each family."""
    return {family: make_checkpoint(family, tmp_path_factory.mktemp("bench")) for family in FAMILIES}


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run ``trivet bench`` in this process, and read the record that it leaves."""
    folder = tmp_path / "records"

    def run(*arguments: object) -> Outcome:
        before = set(folder.glob("*"))
        code = main(["bench", *map(str, arguments), "--out", str(folder)])
        written = capsys.readouterr()
        new = sorted(set(folder.glob("*")) - before)
        assert len(new) <= 1, "one run writes one record"
        return Outcome(code, written.out, written.err, json.loads(new[0].read_text()) if new else None)

    return run
