"""The kit as a pytest plugin: each check is an item, and the report ends with the summary."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from trivet.conformance.check import TIERS, Check
from trivet.conformance.kit import Asked, Kit, open_kit
from trivet.conformance.outcome import Outcome
from trivet.conformance.record import closing_lines, junit, make_record
from trivet.conformance.suite import FamilyConformance
from trivet.errors import TrivetError

PROPERTY = "trivet_outcome"


class _Runs:
    """The families that a session tests, and what became of their checks."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.started = time.perf_counter()
        self._kits: dict[Asked, Kit] = {}
        self._outcomes: dict[Asked, dict[str, Outcome]] = {}

    def kit(self, asked: Asked) -> Kit:
        """The kit of a family, opened once a session."""
        if asked not in self._kits:
            self._kits[asked] = open_kit(asked)
            self._outcomes.setdefault(asked, {})
        return self._kits[asked]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember the outcome that a report brings, from this process or from a worker of xdist."""
        for name, value in report.user_properties:
            if name == PROPERTY and report.when == "call":
                values = json.loads(str(value))
                outcome = Outcome.from_json(values["outcome"])
                self._outcomes.setdefault(_asked_from(values["asked"]), {})[outcome.id] = outcome

    def records(self) -> list[dict[str, Any]]:
        """A record of each family."""
        command = shlex.join(["pytest", *self.config.invocation_params.args])
        seconds = time.perf_counter() - self.started
        return [
            make_record(self.kit(asked), list(outcomes.values()), command, seconds)
            for asked, outcomes in self._outcomes.items()
        ]

    def close(self) -> None:
        """Remove the tiny checkpoints."""
        for kit in self._kits.values():
            kit.close()
        self._kits = {}


_RUNS: pytest.StashKey[_Runs] = pytest.StashKey()


class CheckFailed(Exception):
    """A check failed; the text is for people."""


class ConformanceItem(pytest.Item):
    """One check of one family."""

    def __init__(self, *, asked: Asked, check: Check, **rest: Any) -> None:
        super().__init__(**rest)
        self.asked = asked
        self.check = check

    def runtest(self) -> None:
        """Run the check; its outcome travels with the report."""
        outcome = self.config.stash[_RUNS].kit(self.asked).run(self.check)
        values = {"asked": attrs.asdict(self.asked), "outcome": outcome.as_json()}
        self.user_properties.append((PROPERTY, json.dumps(values, default=str)))
        if outcome.status == "failed" and outcome.failure is not None:
            raise CheckFailed(f"{outcome.id}\n{outcome.failure.text()}")
        if outcome.status == "not run":
            raise CheckFailed(f"{outcome.id} was not run: {outcome.reason}")
        if outcome.status == "expected failure":
            pytest.xfail(outcome.reason)
        if outcome.status == "declared unsupported":
            pytest.skip(outcome.reason)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The text of a failed check, without a traceback."""
        if isinstance(excinfo.value, CheckFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the check is written."""
        return Path(__file__), None, f"{self.asked.model_type}: {self.check.id}"


class ConformanceCollector(pytest.Collector):
    """Every check of one family."""

    def __init__(self, *, asked: Asked, **rest: Any) -> None:
        super().__init__(**rest)
        self.asked = asked

    def collect(self) -> Iterator[ConformanceItem]:
        """An item for each check of the manifest."""
        try:
            kit = self.config.stash[_RUNS].kit(self.asked)
        except TrivetError as error:
            raise self.CollectError(f"{type(error).__name__}: {error}") from error
        for check in kit.manifest():
            yield ConformanceItem.from_parent(self, name=check.id, asked=self.asked, check=check)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, which are those of ``trivet conform``."""
    group = parser.getgroup("trivet", "conformance of a Trivet model family")
    group.addoption("--trivet-family", metavar="MODEL_TYPE", help="check the installed family of this model_type")
    group.addoption("--trivet-tier", action="append", choices=TIERS, help="a tier to run; may be given several times")
    group.addoption("--trivet-model", metavar="DIR", help="a real checkpoint, for the checkpoint tier")
    group.addoption("--trivet-seed", type=int, default=0, metavar="N", help="decides every drawn input")
    group.addoption("--trivet-json", metavar="FILE", help="write the record of the run")
    group.addoption("--trivet-junit", metavar="FILE", help="write JUnit XML made from the record")


def pytest_configure(config: pytest.Config) -> None:
    """Make room for what the session's checks give."""
    runs = _Runs(config)
    config.stash[_RUNS] = runs
    config.pluginmanager.register(runs, "trivet-conformance-runs")


def _asked_from(values: dict[str, Any]) -> Asked:
    tiers, model = values["tiers"], values["model"]
    return Asked(values["model_type"], tuple(tiers) if tiers else None, Path(model) if model else None, values["seed"])


def _asked(config: pytest.Config, model_type: str) -> Asked:
    tiers, model = config.getoption("--trivet-tier"), config.getoption("--trivet-model")
    return Asked(
        model_type,
        tuple(tiers) if tiers else None,
        Path(model) if model else None,
        config.getoption("--trivet-seed"),
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``--trivet-family`` and no path given, nothing else is collected."""
    named = config.args_source == pytest.Config.ArgsSource.ARGS
    return True if config.getoption("--trivet-family") and not named else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the checks of the family that ``--trivet-family`` names, before anything is deselected."""
    model_type = config.getoption("--trivet-family")
    if model_type:
        name = f"conformance[{model_type}]"
        collector = ConformanceCollector.from_parent(session, name=name, nodeid=name, asked=_asked(config, model_type))
        try:
            items.extend(collector.collect())
        except collector.CollectError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> pytest.Collector | None:
    """Collect the checks of a `FamilyConformance`, whatever its class is called."""
    if not isinstance(obj, type) or not issubclass(obj, FamilyConformance) or obj is FamilyConformance:
        return None
    given = _asked(collector.config, obj.model_type)
    seed = obj.seed or given.seed
    asked = Asked(obj.model_type, given.tiers or obj.tiers, given.model, seed)
    made: pytest.Collector = ConformanceCollector.from_parent(collector, name=name, asked=asked)
    return made


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A session that left a check out is not green."""
    runs = session.config.stash[_RUNS]
    if _silent(session.config):
        return
    if exitstatus == pytest.ExitCode.OK and any(not record["passed"] for record in runs.records()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write the records, and end the report with the summaries."""
    runs = config.stash.get(_RUNS, None)
    if runs is None:
        return
    try:
        if not _silent(config):
            records = runs.records()
            _write(config, records)
            terminal = config.pluginmanager.get_plugin("terminalreporter")
            for record in records:
                for line in _report(record, many=len(records) > 1):
                    terminal.write_line(line) if terminal is not None else print(line, file=sys.stdout)
    finally:
        runs.close()


def _silent(config: pytest.Config) -> bool:
    """Whether another process reports, or nothing was run."""
    return hasattr(config, "workerinput") or bool(config.option.collectonly)


def _report(record: dict[str, Any], *, many: bool) -> Sequence[str]:
    lines = closing_lines(record)
    return [f"conformance of {record['model_type']}", *lines] if many else lines


def _write(config: pytest.Config, records: Sequence[dict[str, Any]]) -> None:
    if not records:
        return
    if file := config.getoption("--trivet-json"):
        Path(file).write_text(json.dumps(records[0] if len(records) == 1 else records, indent=1) + "\n")
    if file := config.getoption("--trivet-junit"):
        Path(file).write_text(junit(records[0]))
