"""A run as data: one JSON record, from which the summary, the Markdown table and JUnit are made."""

from __future__ import annotations

import datetime
import hashlib
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any
from xml.etree import ElementTree

import torch

import trivet
from trivet.conformance.check import Tier
from trivet.conformance.coupling import packages_of, sources_of
from trivet.conformance.kit import Kit
from trivet.conformance.outcome import Outcome

SCHEMA = "trivet.conformance/1"
MOST_LISTED = 5
"""Checks with the same reason are listed up to this many, and counted beyond."""

Record = Mapping[str, Any]


def make_record(kit: Kit, outcomes: Sequence[Outcome], command: str, seconds: float) -> dict[str, Any]:
    """The record of a run. What the manifest has and `outcomes` have not is recorded as not run."""
    by_id = {outcome.id: outcome for outcome in outcomes}
    complete = [by_id.get(c.id) or Outcome.of(c, "not run", reason="left out of this run") for c in kit.manifest()]
    counts = count(complete)
    unreached = kit.asked.unreached()
    reached = kit.asked.reached()
    return {
        "schema": SCHEMA,
        "model_type": kit.asked.model_type,
        "family": kit.family_name,
        "passed": counts["failed"] == 0 and counts["not_run"] == 0,
        "summary": summary_line(counts),
        "counts": counts,
        "tiers": {
            "reached": [tier for tier in reached if tier not in unreached],
            "not_reached": {tier: reason for tier, reason in unreached.items() if tier not in reached},
        },
        "seed": kit.asked.seed,
        "command": command,
        "started": (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds)).isoformat(
            timespec="seconds"
        ),
        "seconds": round(seconds, 3),
        "versions": versions(),
        "plugin": {
            "distribution": kit.record.distribution,
            "version": kit.record.version,
            "group": kit.record.group,
            "target": kit.record.target,
            "sha256": sources_sha256(kit) if kit.loaded else "",
        },
        "device": device(),
        "checks": [outcome.as_json() for outcome in complete],
        "not_applicable": [check.id for check in kit.inapplicable()],
    }


def count(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many checks of each kind there are, passed, and so on."""
    required = [outcome for outcome in outcomes if outcome.required]
    optional = [outcome for outcome in outcomes if not outcome.required]

    def of(status: str, among: Sequence[Outcome]) -> int:
        return sum(outcome.status == status for outcome in among)

    return {
        "required": len(required),
        "required_passed": of("passed", required),
        "optional": len(optional),
        "optional_passed": of("passed", optional),
        "declared_unsupported": of("declared unsupported", outcomes),
        "expected_failures": of("expected failure", outcomes),
        "failed": of("failed", outcomes),
        "not_run": of("not run", outcomes),
    }


def summary_line(counts: Mapping[str, int]) -> str:
    """The line that every report ends with."""
    return (
        f"required {counts['required_passed']}/{counts['required']} · "
        f"optional {counts['optional_passed']}/{counts['optional']} · "
        f"declared unsupported {counts['declared_unsupported']} · not run {counts['not_run']}"
    )


def closing_lines(record: Record) -> list[str]:
    """What a report ends with: what was not reached or not run, and the summary."""
    same: dict[tuple[str, str], list[str]] = {}
    for outcome in map(Outcome.from_json, record["checks"]):
        if outcome.status in ("not run", "expected failure", "declared unsupported"):
            same.setdefault((outcome.status, outcome.reason), []).append(outcome.id)
    lines = [
        f"{status}: {', '.join(ids) if len(ids) <= MOST_LISTED else f'{len(ids)} checks'} ({reason})"
        for (status, reason), ids in same.items()
    ]
    tiers: Mapping[Tier, str] = record["tiers"]["not_reached"]
    lines += [f"tier not reached: {tier} ({reason})" for tier, reason in tiers.items()]
    return [*lines, record["summary"]]


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    found = {"trivet": trivet.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("numpy", "safetensors", "transformers", "flashinfer-python", "fla-core", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device() -> dict[str, Any]:
    """The machine, as far as results depend on it."""
    found: dict[str, Any] = {"machine": platform.machine(), "system": platform.system(), "cuda": None}
    if torch.cuda.is_available():
        found["cuda"] = {"name": torch.cuda.get_device_name(0), "version": torch.version.cuda}
    return found


def sources_sha256(kit: Kit) -> str:
    """sha256 over the plugin's Python sources, by name within their package and content."""
    digest = hashlib.sha256()
    for package in packages_of(kit.family, kit.record.target):
        for file in sources_of(package):
            tail = file.parts[file.parts.index(package) :] if package in file.parts else (file.name,)
            content = file.read_bytes()
            digest.update(f"{'/'.join(tail)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def markdown(record: Record) -> str:
    """The record as a Markdown table."""
    about = record["plugin"]
    lines = [
        f"# Conformance of {record['model_type']}",
        "",
        f"{about['distribution']} {about['version']}, Trivet {record['versions']['trivet']}, torch "
        f"{record['versions']['torch']}, {record['started']}, `{record['command']}`",
        "",
        "| check | tier | status | seconds | measured |",
        "|---|---|---|---|---|",
    ]
    for outcome in map(Outcome.from_json, record["checks"]):
        measured = ", ".join(f"{name} {value:.4g}" for name, value in outcome.measured.items())
        note = measured or outcome.reason or (outcome.failure.observed if outcome.failure else "")
        note = " ".join(note.split()).replace("|", "\\|")
        lines.append(f"| `{outcome.id}` | {outcome.tier} | {outcome.status} | {outcome.seconds:.2f} | {note} |")
    tiers = record["tiers"]["not_reached"]
    lines += ["", *(f"tier not reached: {tier} ({reason})" for tier, reason in tiers.items())]
    return "\n".join([*lines, "", record["summary"], ""])


def junit(record: Record) -> str:
    """The record as JUnit XML."""
    counts = record["counts"]
    skipped = counts["declared_unsupported"] + counts["expected_failures"]
    suite = ElementTree.Element(
        "testsuite",
        name=f"trivet.conformance.{record['model_type']}",
        tests=str(len(record["checks"])),
        failures=str(counts["failed"] + counts["not_run"]),
        errors="0",
        skipped=str(skipped),
        time=f"{record['seconds']:.3f}",
        timestamp=record["started"],
    )
    for outcome in map(Outcome.from_json, record["checks"]):
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"trivet.conformance.{record['model_type']}.{outcome.tier}",
            name=outcome.id,
            time=f"{outcome.seconds:.3f}",
        )
        if outcome.status == "failed" and outcome.failure is not None:
            failure = ElementTree.SubElement(case, "failure", message=_printable(outcome.failure.observed))
            failure.text = _printable(outcome.failure.text())
        elif outcome.status == "not run":
            ElementTree.SubElement(case, "failure", message=_printable(f"not run: {outcome.reason}"))
        elif outcome.status != "passed":
            ElementTree.SubElement(case, "skipped", message=_printable(f"{outcome.status}: {outcome.reason}"))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True)


def _printable(text: str) -> str:
    """`text` without the control characters that XML cannot hold."""
    return "".join(c if c in "\n\t" or c.isprintable() else "?" for c in text)
