"""One command makes all GPU records: its stages are commands that exist, and none stops another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from tests.gpu import record_evidence
from tests.gpu.record_evidence import OUT, SLICE, TIMED_OUT, Stage, cut_geometry, main, named_by, stages

import trivet

COMMANDS = [(stage.name, command) for stage in stages() for command in stage.commands]


def python(text: str) -> tuple[str, ...]:
    return ("python", "-c", text)


WRITES = python(f"open('{OUT}/record.json', 'w').write('1'); print('measured')")
FAILS = python("raise SystemExit(3)")
SLEEPS = python("import time; time.sleep(60)")
DEVICE = python("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")


def archived(path: Path) -> dict[str, str]:
    """The texts of an archive, by name."""
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read().decode() for member in archive if member.isfile()}


def summary(path: Path) -> Any:
    return json.loads(archived(path)["summary.json"])


def returncodes(path: Path) -> dict[str, list[int]]:
    ran = summary(path)["results"]["stages"]
    return {stage["stage"]: [command["returncode"] for command in stage["commands"]] for stage in ran}


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_command_line_of_each_stage_parses(name: str, command: tuple[str, ...], tmp_path: Path) -> None:
    if command[0] == "python":
        module = command[2]
        assert command[1] == "-m" and (module == "pytest" or Path(f"{module.replace('.', '/')}.py").exists())
        return
    found, arguments = named_by(command)
    found.make_context(found.name, [word.replace(SLICE, str(tmp_path)) for word in arguments])


def test_every_stage_has_a_name_of_its_own_and_a_place_for_its_records() -> None:
    names = [stage.name for stage in stages()]
    assert len(set(names)) == len(names)
    assert set(names) >= {"tests", "conform-qwen3.5", "gate-27b", "generate-14b", "throughput-27b", "small"}
    assert set(names) >= {"arms-slice", "arms-14b", "graphs-27b", "startup-27b", "memory-14b"}
    for name, command in COMMANDS:
        assert name.startswith("memory-") or any(OUT in word for word in command), "memory prints its record"


def test_arms_are_timed_over_five_pairs_of_a_hundred_steps_and_the_owned_one_with_graphs_too() -> None:
    found = {name: named_by(command) for name, command in COMMANDS if name.startswith(("arms-", "graphs-"))}
    assert set(found) == {"arms-slice", *(f"{kind}-{size}" for kind in ("arms", "graphs") for size in ("14b", "27b"))}
    for name, (command, words) in found.items():
        options = command.make_context(command.name, words).params
        assert (options["pairs"], options["iterations"]) == (5, 100)
        assert options["arms"] == (("owned",) if name.startswith("graphs-") else ("owned", "fresh"))


def test_the_cut_geometry_is_a_model_of_the_same_layers(tmp_path: Path) -> None:
    directory = cut_geometry(tmp_path / "cut")
    cut = trivet.plan_memory(directory, device="h200", kv_pages=10)
    whole = trivet.plan_memory("qwen3-14b", device="h200", kv_pages=10)
    found = [next(line.bytes for line in ledger.items if "KV" in line.name) for ledger in (cut, whole)]
    assert found[1] == 10 * found[0]


def test_a_stage_that_fails_or_takes_too_long_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "evidence.tar"
    known = [
        Stage("broken", (FAILS, WRITES), 30),
        Stage("slow", (SLEEPS, WRITES), 0.5),
        Stage("good", (WRITES, python("import sys; sys.stderr.write('careful')")), 30),
    ]
    assert main([str(out)], known) == 1
    assert returncodes(out) == {"broken": [3, 0], "slow": [TIMED_OUT, TIMED_OUT], "good": [0, 0]}
    files = archived(out)
    assert {name: files[f"good/{name}"] for name in ("record.json", "1.stdout", "2.stderr")} == {
        "record.json": "1",
        "1.stdout": "measured\n",
        "2.stderr": "careful",
    }
    assert "broken/record.json" in files and "slow/record.json" not in files
    kept = summary(out)
    assert kept["versions"]["trivet"] == trivet.__version__ and kept["results"]["stages"][0]["commands"][0]["seconds"]
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["broken", "slow", "good"]
    assert "return code 3, 0" in said[0]


def test_stages_are_shared_out_over_devices_after_those_that_want_to_be_alone(tmp_path: Path) -> None:
    out = tmp_path / "evidence.tar"
    waiting = python(
        f"import pathlib, time\nwhile len(list(pathlib.Path('{OUT}').parent.glob('*/1.stdout'))) < 3: time.sleep(0.01)"
    )
    known = [
        Stage("a", (waiting, DEVICE), 30),
        Stage("b", (waiting, DEVICE), 30),
        Stage("all", (DEVICE,), 30, alone=True),
    ]
    assert main([str(out), "--devices", "4,7"], known) == 0, returncodes(out)
    files = archived(out)
    assert files["all/1.stdout"] == "4,7\n"
    assert sorted(files[f"{name}/2.stdout"] for name in "ab") == ["4\n", "7\n"]


def test_only_what_is_named_is_run_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "evidence.tar"
    known = [Stage(name, (WRITES,), 30) for name in ("a", "b", "c")]
    assert main(["--only", "c,a", str(out)], known) == 0
    assert set(returncodes(out)) == {"a", "c"}
    capsys.readouterr()
    assert main(["--list", "--only", "b"], known) == 0
    assert capsys.readouterr().out.startswith("b (at most 30 s)\n  python -c ")
    with pytest.raises(SystemExit):
        main([str(out), "--only", "d"], known)
    assert "no stage is called d: expected a, b, c" in capsys.readouterr().err


def test_a_run_that_is_ended_leaves_the_archive_so_far_and_no_process(tmp_path: Path) -> None:
    out, running = tmp_path / "evidence.tar", tmp_path / "running"
    sleeps = python(f"import os, time; open({str(running)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    code = (
        "import signal; from tests.gpu.record_evidence import *; signal.signal(signal.SIGTERM, terminated)\n"
        f"main([{str(out)!r}], [Stage('good', ({WRITES!r},), 30), Stage('long', ({sleeps!r},), 60)])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=record_evidence.ROOT)
    give_up = time.monotonic() + 30
    while not (running.exists() and running.read_text()) and time.monotonic() < give_up:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert returncodes(out)["good"] == [0]
    with pytest.raises(ProcessLookupError):
        os.kill(int(running.read_text()), 0)
