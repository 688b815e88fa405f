"""Keep what a run of the GPU tests measured: ``python -m tests.gpu.record_results OUT.json REPORT.xml...``.

The reports are pytest's, written with ``-o junit_family=xunit1 --junitxml=REPORT.xml``.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import transformers

from trivet.attention.flashinfer.library import TESTED_VERSION


def results(report: Path) -> list[dict[str, Any]]:
    """Name, outcome, seconds and recorded properties of each test."""
    tests = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcome = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")
        test = {"test": case.get("name"), "outcome": outcome, "seconds": float(case.get("time", 0))}
        properties = {entry.get("name"): entry.get("value") for entry in case.iter("property")}
        tests.append(test | ({"recorded": properties} if properties else {}))
    return tests


def main(out: str, *reports: str) -> None:
    """Write all results to `out`."""
    by_file = {Path(report).stem: results(Path(report)) for report in reports}
    outcomes = [test["outcome"] for tests in by_file.values() for test in tests]
    document = {
        "device": torch.cuda.get_device_name(),
        "flashinfer": TESTED_VERSION,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        "tests": by_file,
    }
    Path(out).write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(document["outcomes"])


if __name__ == "__main__":
    main(*sys.argv[1:])
