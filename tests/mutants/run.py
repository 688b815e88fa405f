"""Show that the conformance kit catches faults: each patch is one, and a check must fail for each.

    python -m tests.mutants.run [FOLDER] [--only NAME]... [--workers N] [--json FILE] [--texts]

Prints a row for each mutant and ends with ``killed K/N``. Exit code 1 unless all were killed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attrs import frozen
from tests.mutants.patch import DoesNotApply, Patch

ROOT = Path(__file__).parents[2]
PATCHES = Path(__file__).parent / "patches"
SOURCES = ("core", "plugins")
TIMEOUT_S = 300
TARGETS_OF = (
    ("plugins/qwen35/", ("qwen3_5_text", "qwen3_5")),
    ("plugins/qwen3/", ("qwen3",)),
    ("core/trivet/cli/template/", ("template",)),
)
"""Which families a patch concerns, by the files that it changes."""
OF_THE_SDK = ("qwen3", "qwen3_5_text", "template")
UNMODIFIED = ("qwen3", "qwen3_5_text", "qwen3_5", "template")


@frozen
class Verdict:
    """What became of a mutant.

    Attributes:
        name, fault: of the patch.
        killed: whether a check failed, with a text that names the fault where the patch says how.
        by: the check that failed, or why none did.
        seconds: how long the trial took.
        text: the failure.
    """

    name: str
    fault: str
    killed: bool
    by: str
    seconds: float
    text: str = ""

    def row(self, width: int) -> str:
        """One line of the table."""
        verdict = self.by if self.killed else f"SURVIVED: {self.by}"
        return f"{self.name:<{width}}  {self.seconds:5.1f} s  {verdict}"


def targets_of(patch: Patch) -> tuple[str, ...]:
    """The families that the kit is run on."""
    if stated := patch.headers.get("Targets"):
        return tuple(stated.replace(",", " ").split())
    found = [targets for prefix, targets in TARGETS_OF if any(file.startswith(prefix) for file in patch.files)]
    return tuple(dict.fromkeys(target for targets in found for target in targets)) or OF_THE_SDK


def copy_tree(into: Path) -> None:
    """A copy of the sources, found by Python as an installed distribution once it stands on the path."""
    for source in SOURCES:
        shutil.copytree(ROOT / source, into / source, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", into)


def _describe(tree: Path) -> None:
    """Metadata with the entry points of the tree's pyproject.toml, which a patch may have changed."""
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = tree / "core" / "trivet-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = []
    for group, named in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in named.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


def try_tree(tree: Path, targets: Sequence[str]) -> dict[str, Any]:
    """Run a trial over `tree` in a process of its own."""
    _describe(tree)
    path = [tree / "core", *sorted((tree / "plugins").iterdir()), ROOT]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "TRIVET_PLUGINS": "",
    }
    command = [sys.executable, "-m", "tests.mutants.trial", str(tree), *targets]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"dead": f"no end within {TIMEOUT_S} s"}
    except (IndexError, ValueError):
        return {"dead": f"exit code {done.returncode}: {' '.join(done.stderr.split()[-30:])}"}
    return answer


def try_patch(path: Path) -> Verdict:
    """Apply a patch to a copy of the tree and try it."""
    started = time.perf_counter()
    fault = by = text = ""
    killed = False
    with tempfile.TemporaryDirectory(prefix="trivet-mutant-") as directory:
        tree = Path(directory).resolve()
        try:
            patch = Patch.read(path)
            fault = patch.headers.get("Fault", "")
            copy_tree(tree)
            patch.apply(tree)
            answer = try_tree(tree, targets_of(patch))
        except DoesNotApply as error:
            answer = {"dead": f"does not apply: {error}"}
    if caught := answer.get("caught"):
        by, text = f"{caught['check']} ({caught['target']})", caught["text"]
        names = patch.headers.get("Names")
        killed = names is None or re.search(names, text, re.IGNORECASE | re.DOTALL) is not None
        if not killed:
            by += f" fails, and its text does not mention /{names}/"
    elif dead := answer.get("dead"):
        by = f"no fair trial: {dead}"
    else:
        by = f"every check passed on {', '.join(answer['survived'])}"
    return Verdict(path.stem, fault, killed, by, time.perf_counter() - started, text)


def try_unmodified() -> list[str]:
    """What is wrong with the sources as they are; a mutant shows nothing while that is not empty."""
    with tempfile.TemporaryDirectory(prefix="trivet-unmodified-") as directory:
        tree = Path(directory).resolve()
        copy_tree(tree)
        answer = try_tree(tree, UNMODIFIED)
    if summaries := answer.get("survived"):
        for target, summary in summaries.items():
            print(f"unmodified {target}: {summary}", flush=True)
        return [f"{target}: {summary}" for target, summary in summaries.items() if "not run 0" not in summary]
    return [json.dumps(answer)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every patch of a folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run")
    parser.add_argument("folder", nargs="?", type=Path, default=PATCHES)
    parser.add_argument("--only", action="append", metavar="NAME", help="patches whose name holds this")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--texts", action="store_true", help="print the failures too")
    options = parser.parse_args(arguments)
    paths = sorted(options.folder.rglob("*.patch"))
    paths = [path for path in paths if not options.only or any(name in path.stem for name in options.only)]
    if not paths:
        print(f"there is no *.patch in {options.folder}", file=sys.stderr)
        return 2
    if wrong := try_unmodified():
        print(f"the unmodified sources fail: {'; '.join(wrong)}", file=sys.stderr)
        return 1
    width = max(len(path.stem) for path in paths)
    verdicts = []
    with ThreadPoolExecutor(options.workers) as pool:
        for verdict in pool.map(try_patch, paths):
            verdicts.append(verdict)
            print(verdict.row(width), flush=True)
            if verdict.text and (options.texts or not verdict.killed):
                print(verdict.text, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([vars_of(verdict) for verdict in verdicts], indent=1) + "\n")
    killed = sum(verdict.killed for verdict in verdicts)
    print(f"killed {killed}/{len(verdicts)}")
    return 0 if killed == len(verdicts) else 1


def vars_of(verdict: Verdict) -> dict[str, Any]:
    """A verdict as data."""
    return {name: getattr(verdict, name) for name in ("name", "fault", "killed", "by", "seconds", "text")}


if __name__ == "__main__":
    sys.exit(main())
