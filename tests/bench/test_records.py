"""Every benchmark leaves one record that says what was run, on what and with what, and nothing private."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from trivet.bench.figures import Figures, table
from trivet.bench.prompts import Lengths
from trivet.bench.record import SCHEMA_VERSION, Record
from trivet.cli import main

Run = Callable[..., Any]


def test_a_record_says_what_repeats_it_and_names_no_host_or_path(bench: Run, checkpoints: dict[str, Path]) -> None:
    model = checkpoints["qwen3"]
    arguments = ("decode", "--model", model, "--batch", "2", "--context", "5", "--iterations", "3", "--pairs", "1")
    outcome = bench(*arguments, "--arm", "owned", "--dtype", "float32")
    assert outcome.code == 0, outcome.err
    record = outcome.record
    assert record["schema_version"] == SCHEMA_VERSION
    assert record["benchmark"] == "decode"
    assert record["command"] == (
        "trivet bench decode --batch 2 --context 5 --iterations 3 --pairs 1 --arm owned "
        f"--model {model.name} --dtype float32"
    )
    assert record["settings"]["batches"] == [2] and record["settings"]["seed"] == 0, "defaults are kept too"
    assert record["commit"] is None or re.fullmatch(r"[0-9a-f]{40}\+?", record["commit"])
    assert {"python", "trivet", "torch", "numpy"} <= set(record["versions"])
    assert {"system", "processor", "cores", "memory_bytes", "torch_threads"} <= set(record["machine"])
    text = str(record)
    for private in (socket.gethostname(), str(Path.home()), str(model.parent), str(Path.cwd())):
        assert private not in text or private in ("/", "localhost"), private


def test_no_record_takes_the_place_of_another(tmp_path: Path) -> None:
    started = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    paths = [Record.of("host", "trivet bench host", {}, {"run": run}, started).write(tmp_path) for run in range(3)]
    assert len(set(paths)) == 3
    assert [path.name for path in paths] == [f"host-20300102T030405Z{end}.json" for end in ("", "-2", "-3")]


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet.bench.decode.bench_decode", lambda *_: pytest.fail("measured"))
    taken = tmp_path / "taken"
    taken.write_text("a file")
    assert main(["bench", "decode", "--out", str(taken)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(taken) in error and "name another folder" in error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("decode", "--batch", "0"), "--batch"),
        (("decode", "--batch", "1,two"), "--batch"),
        (("decode", "--arm", "owned,stale"), "--arm"),
        (("decode", "--peer", "someone"), "--peer"),
        (("decode", "--mixed-new", "9-3"), "--mixed-new"),
        (("serve", "--prompt-tokens", "many"), "--prompt-tokens"),
        (("startup", "--warm", "0"), "--warm"),
        (("host", "--requests", ""), "--requests"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_exit_code_2_and_names_the_option(bench: Run, arguments: tuple[str, ...], named: str) -> None:
    outcome = bench(*arguments)
    assert outcome.code == 2 and outcome.record is None
    assert named in outcome.err and outcome.err.count("\n") == 1


def test_a_record_goes_to_a_folder_that_need_not_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "host", "--requests", "1", "--steps", "2"]) == 0
    (path,) = Path("records").glob("host-*.json")
    assert json.loads(path.read_text())["command"] == "trivet bench host --requests 1 --steps 2"


def test_percentiles_are_samples_by_the_nearest_rank() -> None:
    figures = Figures.of([float(value) for value in range(200, 0, -1)])
    assert (figures.least, figures.mean, figures.p50, figures.p95, figures.p99) == (1, 100.5, 100, 190, 198)
    assert Figures.of([7.0]) == Figures(1, 7.0, 7.0, 7.0, 7.0, 7.0)


def test_tables_have_a_column_for_each_heading() -> None:
    lines = table(("name", "value"), [("a", 1.23456), ("long name", 12345.6)]).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert "1.235" in lines[2] and "12346" in lines[3]


@pytest.mark.parametrize(("text", "lengths"), [("7", Lengths(7, 7)), ("2-9", Lengths(2, 9))])
def test_lengths_read_as_they_are_written(text: str, lengths: Lengths) -> None:
    assert Lengths.parse(text) == lengths and str(lengths) == text
