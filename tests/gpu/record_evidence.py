"""Make the GPU records of sdk_docs/evidence: ``python -m tests.gpu.record_evidence OUT.tar [--only NAME,...]``.

Runs the stages of `stages`, from the root of the repository, on a machine with CUDA devices: `--devices 0,1` lets two
of them work side by side, each stage on one. A stage that fails or takes too long does not stop the others. The archive
is written anew after each stage, so that it holds what there is whenever the run ends: a folder for each stage with its
records and what its commands printed, and `summary.json`. Exit code 0 if every stage succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
from attrs import asdict, frozen

import trivet
from trivet.bench.record import Record, now
from trivet.cli.main import trivet as program

ROOT = Path(__file__).parents[2]
GEOMETRIES = Path(trivet.__file__).parent / "models" / "geometries"
PROGRAMS = {"trivet": (sys.executable, "-m", "trivet"), "python": (sys.executable,)}
OUT, SLICE = "{out}", "{slice}"
"""Where a command is given the folder of its stage, and the directory that `cut_geometry` makes."""
TIMED_OUT = 124
"""The return code of a command that took too long or was not begun, as ``timeout`` gives it."""

Command = tuple[str, ...]


@frozen
class Stage:
    """Commands that make records together.

    Attributes:
        name: of the stage, and of its folder in the archive.
        commands: run one after the other, each whether or not the one before succeeded.
        limit_s: after which the command that runs then is ended, and the others are not begun.
        alone: whether it runs before all others, and sees all devices.
    """

    name: str
    commands: tuple[Command, ...]
    limit_s: float
    alone: bool = False


@frozen
class Outcome:
    """How a stage ended.

    Attributes:
        stage: what was run.
        devices: what it saw of them, as ``CUDA_VISIBLE_DEVICES`` has it.
        seconds: of each command.
        returncodes: of each command; `TIMED_OUT` where the limit ended it.
    """

    stage: Stage
    devices: str
    seconds: tuple[float, ...]
    returncodes: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Whether every command succeeded."""
        return not any(self.returncodes)

    def line(self) -> str:
        """What is printed of it."""
        codes = ", ".join(map(str, self.returncodes))
        return f"{self.stage.name:<16} {sum(self.seconds):7.1f} s  return code {codes}  (device {self.devices})"


def of(text: str) -> Command:
    """The words of a command line."""
    return tuple(shlex.split(text))


def bench(kind: str, model: str, options: str) -> Command:
    """A command of ``trivet bench`` over random weights."""
    return of(f"trivet bench {kind} --model {model} --weights random --device cuda {options} --out {OUT}")


def generate(model: str, options: str, step_tokens: int = 8192) -> Command:
    """``trivet bench generate`` as all of its records have it."""
    return bench("generate", model, f"--prompt-tokens 512 --max-step-tokens {step_tokens} {options}")


def arms(model: str, names: str = "owned,fresh", options: str = "") -> Command:
    """``trivet bench decode``: a plan that is owned against one that is fresh, or one of them alone."""
    steps = "--batch 1,16 --context 512 --pairs 5 --iterations 100"
    return bench("decode", model, f"{steps} --arm {names} {options}")


def conform(family: str) -> Command:
    """The device tier of the checks of one family."""
    return of(f"trivet conform {family} --tier device --json {OUT}/conform.json")


def of_model(size: str, model: str) -> Iterator[Stage]:
    """The stages of a large model."""
    yield Stage(f"gate-{size}", (of(f"trivet gate {model} --weights random --device cuda --long --out {OUT}"),), 900)
    steps = "--batch 1,16,64 --new-tokens 256 --repeats 2 --ttft 4096 --warm-ttft 4096 --kernels"
    yield Stage(f"generate-{size}", (generate(model, steps),), 600)
    others = "--batch 2,4,8,24,32,48 --new-tokens 48 --repeats 2"
    yield Stage(f"batches-{size}", (generate(model, others),), 600)
    many = "--batch 64 --new-tokens 16 --repeats 2 --many 256 --many-new-tokens 128 --max-requests 256"
    yield Stage(f"throughput-{size}", (generate(model, many, 16384),), 600)
    pinned = "--batch 1,16,64 --new-tokens 64 --repeats 2 --numeric-policy pinned"
    yield Stage(f"pinned-{size}", (generate(model, pinned),), 600)
    clients = "--requests 64 --concurrency 16 --prompt-tokens 512-8192 --new-tokens 128 --max-step-tokens 2048"
    yield Stage(f"serve-{size}", (bench("serve", model, clients),), 300)
    yield Stage(f"arms-{size}", (arms(model),), 300)
    yield Stage(f"graphs-{size}", (arms(model, "owned"),), 300)
    yield Stage(f"startup-{size}", (bench("startup", model, "--cold 1 --warm 1"),), 900)
    live, planned = "--live --weights random --device cuda --json", "--device h200 --json"
    yield Stage(f"memory-{size}", (of(f"trivet memory {model} {live}"), of(f"trivet memory {model} {planned}")), 300)


def stages() -> tuple[Stage, ...]:
    """What is run, in this order."""
    tests = (
        of(f"python -m pytest -n 10 tests/gpu -o junit_family=xunit1 --junitxml={OUT}/gpu-tests.xml"),
        of(f"python -m pytest tests/gpu/test_ledger_on_cuda.py -o junit_family=xunit1 --junitxml={OUT}/gpu-ledger.xml"),
        of(f"python -m tests.gpu.record_results {OUT}/gpu-tests.json {OUT}/gpu-tests.xml {OUT}/gpu-ledger.xml"),
    )
    few = "--batch 1,16,64 --new-tokens 128 --repeats 2"
    return (
        Stage("tests", tests, 1200, alone=True),
        Stage("conform-qwen3", (conform("qwen3"),), 300),
        Stage("conform-qwen3.5", (conform("qwen3_5_text"),), 300),
        *of_model("14b", "qwen3-14b"),
        *of_model("27b", "qwen3.5-27b"),
        Stage("small", (generate("qwen3-0.6b", few), generate("qwen3-4b", few)), 600),
        Stage("arms-slice", (arms(SLICE, options="--kv-pages 2000"),), 300),
    )


def named_by(command: Command) -> tuple[click.Command, list[str]]:
    """The command of ``trivet`` that `command` names, and its arguments."""
    found: click.Command = program
    arguments = list(command[1:])
    while isinstance(found, click.Group):
        found = found.commands[arguments.pop(0)]
    return found, arguments


def cut_geometry(directory: Path, name: str = "qwen3-14b", layers: int = 4) -> Path:
    """A model directory of a shipped geometry with its first layers alone."""
    config = json.loads((GEOMETRIES / name / "config.json").read_text(encoding="utf-8"))
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}), encoding="utf-8")
    return directory


class Recorder:
    """Runs stages in `work`, and keeps what they leave in the archive `out`.

    Args:
        work: an empty directory.
        report: told a line for each stage.
    """

    def __init__(self, work: Path, out: Path, report: Callable[[str], None]) -> None:
        self._out = out
        self._report = report
        self._records = work / "records"
        self._records.mkdir()
        self._slice = cut_geometry(work / "qwen3-14b-slice")
        self._started = now()
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False
        self.outcomes: list[Outcome] = []

    def run(self, wanted: Sequence[Stage], devices: Sequence[str]) -> None:
        """Run `wanted`: those that want to be alone with all of `devices`, then the others, one at a time on each."""
        alone: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        others: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        for stage in wanted:
            (alone if stage.alone else others).put(stage)
        self._side_by_side(alone, [",".join(devices)])
        self._side_by_side(others, devices)

    def _side_by_side(self, waiting: queue.SimpleQueue[Stage], devices: Sequence[str]) -> None:
        workers = [threading.Thread(target=self._work, args=(waiting, device)) for device in devices]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        except BaseException:
            self._ended = True
            for process in tuple(self._running):
                end(process)
            for worker in workers:
                worker.join()
            raise

    def _work(self, waiting: queue.SimpleQueue[Stage], device: str) -> None:
        while not self._ended:
            try:
                stage = waiting.get_nowait()
            except queue.Empty:
                return
            self._run(stage, device)

    def _run(self, stage: Stage, devices: str) -> None:
        folder = self._records / stage.name
        folder.mkdir()
        started, seconds, codes = time.monotonic(), [], []
        for number, command in enumerate(stage.commands, 1):
            before = time.monotonic()
            left_s = stage.limit_s - (before - started)
            codes.append(self._returncode(command, folder, number, devices, left_s))
            seconds.append(round(time.monotonic() - before, 2))
        outcome = Outcome(stage, devices, tuple(seconds), tuple(codes))
        with self._lock:
            self.outcomes.append(outcome)
            self._report(outcome.line())
            self._pack()

    def _returncode(self, command: Command, folder: Path, number: int, devices: str, limit_s: float) -> int:
        if limit_s <= 0 or self._ended:
            return TIMED_OUT
        places = {OUT: str(folder), SLICE: str(self._slice)}
        words = [*PROGRAMS[command[0]], *(filled(word, places) for word in command[1:])]
        with (folder / f"{number}.stdout").open("wb") as said, (folder / f"{number}.stderr").open("wb") as warned:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": devices}
            process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=said, stderr=warned, start_new_session=True
            )
            self._running.add(process)
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return TIMED_OUT
            finally:
                end(process)
                self._running.discard(process)

    def _pack(self) -> None:
        """Write the archive of what there is in place of the one before."""
        (self._records / "summary.json").write_text(json.dumps(self._summary(), indent=1) + "\n", encoding="utf-8")
        unfinished = self._out.with_name(f".{self._out.name}.part")
        with tarfile.open(unfinished, "w") as archive:
            for folder in sorted([*(outcome.stage.name for outcome in self.outcomes), "summary.json"]):
                archive.add(self._records / folder, arcname=folder)
        unfinished.replace(self._out)

    def _summary(self) -> dict[str, Any]:
        ran = [
            {
                "stage": outcome.stage.name,
                "devices": outcome.devices,
                "commands": [
                    {"command": shlex.join(command), "seconds": seconds, "returncode": code}
                    for command, seconds, code in zip(
                        outcome.stage.commands, outcome.seconds, outcome.returncodes, strict=True
                    )
                ],
            }
            for outcome in self.outcomes
        ]
        results = {"stages": ran, "tree": tree()}
        return asdict(Record.of("evidence", "python -m tests.gpu.record_evidence", {}, results, self._started))


def filled(word: str, places: Mapping[str, str]) -> str:
    """`word` with what stands in its places."""
    for place, value in places.items():
        word = word.replace(place, value)
    return word


def end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a command and of what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tree() -> str | None:
    """The commit that is checked out where the tests lie, with ``+`` where files differ from it; None without git."""
    try:
        commit, changed = (
            subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}+" if changed else commit


def terminated(number: int, frame: object) -> None:
    """Leave by an exception, so that nothing is left running."""
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None, known: Sequence[Stage] | None = None) -> int:
    """Run what is asked for; the exit code.

    Args:
        arguments: without the program's name; None: those of the process.
        known: stages in place of `stages`.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.record_evidence", description=__doc__.split("\n\n")[0])
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT.tar", help="the archive")
    parser.add_argument(
        "--only", type=lambda names: names.split(","), default=[], metavar="NAME,...", help="all by default"
    )
    parser.add_argument("--devices", default="0", help="that work side by side, as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--list", action="store_true", help="print the stages and their commands")
    asked = parser.parse_args(arguments)
    known = stages() if known is None else known
    unknown = sorted(set(asked.only) - {stage.name for stage in known})
    if unknown:
        parser.error(f"no stage is called {', '.join(unknown)}: expected {', '.join(stage.name for stage in known)}")
    wanted = [stage for stage in known if not asked.only or stage.name in asked.only]
    if asked.list:
        for stage in wanted:
            print(f"{stage.name} (at most {stage.limit_s:.0f} s)")
            print("".join(f"  {shlex.join(command)}\n" for command in stage.commands), end="")
        return 0
    if asked.out is None:
        parser.error("OUT.tar is missing")
    with tempfile.TemporaryDirectory() as work:
        recorder = Recorder(Path(work), asked.out.absolute(), partial(print, flush=True))
        recorder.run(wanted, asked.devices.split(","))
    return int(not all(outcome.ok for outcome in recorder.outcomes))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminated)
    sys.exit(main())
