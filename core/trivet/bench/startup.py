"""``trivet bench startup``: from the start of a process to the first token that it gives.

Each start is a process of its own. A cold one finds no compiled bytecode and no built kernels; a warm one finds what
the cold one left. The files of the checkpoint are in the system's cache for all but the first.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from attrs import asdict, frozen

from trivet.bench.figures import table
from trivet.bench.stepping import BenchmarkError

Report = Callable[[str], None]
Temperature = Literal["cold", "warm"]

CACHES = {
    "PYTHONPYCACHEPREFIX": "bytecode",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}
"""Environment variables that say where compiled code is kept, and the folder that each is pointed to."""

TIMEOUT_S = 1800
"""Of one start, from its process to its end: kernels that are built in it take minutes."""

CHILD = """
import json, sys, time
began = time.perf_counter()
import trivet
from trivet import Runtime, Sampling
import torch
imported = time.perf_counter()
model, load, told = sys.argv[1], json.loads(sys.argv[2]), open(int(sys.argv[3]), "w")
if "limits" in load:
    from trivet.runtime.device import resolve_device
    load["limits"] = trivet.Limits(**load["limits"][resolve_device(load.get("device"))[0].type])
with Runtime.load(model, autostart=False, **load) as runtime:
    loaded = time.perf_counter()
    token = next(iter(runtime.stream([0], Sampling(max_new_tokens=1, ignore_eos=True))))
    first = time.perf_counter()
    phases = {"import_s": imported - began, "load_s": loaded - imported, "first_token_s": first - loaded}
    print(json.dumps(phases), file=told, flush=True)
    from trivet.bench.record import machine_of
    print(json.dumps(machine_of(load.get("device"))), file=told, flush=True)
"""
"""What a start runs. It tells its phases, then its machine, in a line each: not on its standard output, where whatever
is imported may write too, but to the descriptor that it is given."""

LINES_TOLD = 2


@frozen
class StartupSettings:
    """What is started.

    Attributes:
        model: a checkpoint, or the name of a shipped model.
        cold: cold starts.
        warm: warm starts behind the last cold one.
        load: further arguments of `Runtime.load`, as JSON has them; limits as a mapping of all of them for each kind of
            device, since only a start finds out what it is on.
    """

    model: str
    cold: int
    warm: int
    load: Mapping[str, Any]


@frozen
class Start:
    """One start.

    Attributes:
        temperature: ``"cold"`` or ``"warm"``.
        total_s: from the start of the process to its first token.
        interpreter_s: to the first line that it ran.
        import_s: importing Trivet and torch.
        load_s: `Runtime.load`.
        first_token_s: from then on.
    """

    temperature: Temperature
    total_s: float
    interpreter_s: float
    import_s: float
    load_s: float
    first_token_s: float


def bench_startup(settings: StartupSettings, report: Report) -> dict[str, Any]:
    """Start processes; tells `report` the table, and returns what a record keeps.

    Raises:
        BenchmarkError: a process failed, with what it wrote, or took longer than `TIMEOUT_S`.
    """
    told: list[tuple[Start, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept"
        for number in range(settings.cold):
            caches = kept if number == settings.cold - 1 else Path(folder) / str(number)
            told.append(_start(settings, "cold", caches))
        told += [_start(settings, "warm", kept) for _ in range(settings.warm)]
    starts = [start for start, _ in told]
    _, machine = told[-1]
    names = ("total_s", "interpreter_s", "import_s", "load_s", "first_token_s")
    medians = {
        temperature: {
            name: statistics.median(getattr(start, name) for start in starts if start.temperature == temperature)
            for name in names
        }
        for temperature in dict.fromkeys(start.temperature for start in starts)
    }
    rows = [(temperature, *figures.values()) for temperature, figures in medians.items()]
    header = ("start", "to first token s", "interpreter", "import", "load", "first token")
    report(f"medians of {settings.cold} cold and {settings.warm} warm starts\n{table(header, rows)}")
    return {"starts": [asdict(start) for start in starts], "medians": medians, "machine": machine}


def _start(settings: StartupSettings, temperature: Temperature, caches: Path) -> tuple[Start, dict[str, Any]]:
    """One start, and what its process said of the machine."""
    environment = {**os.environ, **{variable: str(caches / name) for variable, name in CACHES.items()}}
    readable, writable = os.pipe()
    command = [sys.executable, "-c", CHILD, settings.model, json.dumps(dict(settings.load)), str(writable)]
    started = time.perf_counter()
    with open(readable, "rb", buffering=0) as pipe, tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=(writable,), env=environment
            )
        finally:
            os.close(writable)
        with process:
            try:
                lines, first_s = _told(pipe, started + TIMEOUT_S)
                process.wait(max(0.0, started + TIMEOUT_S - time.perf_counter()))
            except (TimeoutError, subprocess.TimeoutExpired) as error:
                raise BenchmarkError(f"a start did not end within {TIMEOUT_S} s: it was ended") from error
            finally:
                process.kill()  # nothing where it has ended
        errors.seek(0)
        written = errors.read()
    if process.returncode or len(lines) != LINES_TOLD:
        last = written.strip().splitlines()[-1:] or ["it wrote nothing"]
        raise BenchmarkError(f"a start ended with exit code {process.returncode}: {last[0]}")
    phases, machine = (json.loads(line) for line in lines)
    total_s = first_s - started
    return Start(temperature, total_s, total_s - sum(phases.values()), **phases), machine


def _told(pipe: FileIO, until_s: float) -> tuple[list[bytes], float]:
    """The lines that a start tells, fewer where it ends before, and when the first of them came.

    Raises:
        TimeoutError: neither came until `until_s`, by the clock of `time.perf_counter`.
    """
    told, first_s = b"", 0.0
    while told.count(b"\n") < LINES_TOLD:
        ready, _, _ = select.select([pipe], [], [], max(0.0, until_s - time.perf_counter()))
        if not ready:
            raise TimeoutError
        part = pipe.read(2**16)
        if not part:
            break
        first_s = first_s or time.perf_counter()
        told += part
    return told.splitlines(), first_s
