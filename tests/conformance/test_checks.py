"""Every check has an identity that lasts, a contract, a place in the docs, and says everything when it fails."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.write_docs import MARK, PAGE, rendered

from trivet.conformance import CHECKS, Asked, Broken, Check, Failure, Kit
from trivet.conformance.check import check
from trivet.conformance.failure import NotRun
from trivet.plugin import Capabilities

ROOT = Path(__file__).parents[2]


class BrokenBench:
    """Stands where a bench is expected, and fails whatever is asked of it."""

    class Unexpected(Exception):
        """What nobody foresaw."""

    def __getattr__(self, name: str) -> Any:
        raise self.Unexpected("the bench is broken")


@pytest.fixture(scope="module")
def kit() -> Iterator[Kit]:
    with Kit(Asked("qwen3")) as opened:
        yield opened


def test_ids_are_unique_and_each_area_has_checks() -> None:
    assert [id for id, count in Counter(check.id for check in CHECKS).items() if count > 1] == []
    areas = {check.id.partition(".")[0] for check in CHECKS}
    assert areas >= {"plugin", "config", "capacity", "layout", "ledger", "plan", "paths", "weights", "capability"}
    assert areas >= {"isolation", "state", "prefix", "serving", "sampling", "numerics", "device", "checkpoint"}


def test_each_capability_is_checked_from_both_sides() -> None:
    refusals = {check.id for check in CHECKS if check.id.startswith("capability.")}
    assert refusals == {f"capability.{name.replace('_', '-')}-refusal/1" for name in Capabilities.names()}
    assert {check.capability for check in CHECKS if check.capability} == set(Capabilities.names())


@pytest.mark.parametrize("check", [c for c in CHECKS if c.id != "numerics.tolerances/1"], ids=lambda check: check.id)
def test_a_check_that_meets_what_it_did_not_foresee_still_fills_every_field(check: Check, kit: Kit) -> None:
    benches, kit.benches = kit.benches, {"cpu": BrokenBench(), "cuda": BrokenBench()}  # type: ignore[assignment]
    try:
        outcome = kit._outcome(check)
    finally:
        kit.benches = benches
    assert outcome.status == "failed" and outcome.failure is not None
    filled = {name: getattr(outcome.failure, name) for name in Failure.__slots__ if not name.startswith("__")}
    assert filled.keys() >= {"contract", "observed", "expected", "cause", "rerun", "docs"}
    assert all(str(value).strip() for value in filled.values()), filled
    assert outcome.failure.rerun == f"trivet conform qwen3 --check {check.id} --seed 0"
    assert all(str(value).split()[0] in outcome.failure.text() for value in filled.values())


@pytest.mark.parametrize("missing", ["observed", "expected", "cause"])
def test_a_failure_cannot_leave_a_field_empty(missing: str) -> None:
    fields = {"observed": "a", "expected": "b", "cause": "c", missing: " "}
    with pytest.raises(ValueError, match=missing):
        Broken(**fields)


def test_every_expectation_in_the_checks_gives_observed_expected_and_cause() -> None:
    import ast

    calls = 0
    for file in (ROOT / "core/trivet/conformance").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("expect", "broken", "Broken"):
                calls += 1
                given = {keyword.arg for keyword in node.keywords}
                assert given >= {"observed", "expected", "cause"}, f"{file}:{node.lineno}"
    assert calls > 150


@pytest.mark.parametrize(
    "wrong", [{"id": "plan/1"}, {"id": "plan.x"}, {"tier": "gpu"}, {"capability": "speed"}, {"contract": ""}]
)
def test_a_check_that_is_not_whole_cannot_be_made(wrong: dict[str, str]) -> None:
    good = {"id": "plan.x/1", "tier": "protocol", "contract": "it holds", "cause": "it does not"}
    with pytest.raises(ValueError):
        Check(**{**good, **wrong}, run=lambda bench: None)  # type: ignore[arg-type]


def test_the_docs_list_every_check_as_the_manifest_has_it() -> None:
    _, _, below = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert below == rendered(), "run python -m tests.conformance.write_docs"
    for each in CHECKS:
        assert f'<a id="{each.docs.partition("#")[2]}"></a>' in below and each.contract in below


def test_the_counts_in_the_docs_are_those_of_a_dense_family(kit: Kit) -> None:
    manifest = kit.manifest()
    required = sum(check.required for check in manifest)
    line = f"required {required}/{required} · optional {len(manifest) - required}/{len(manifest) - required} · "
    for page in ("conformance.md", "tutorial_llama.md"):
        for found in re.findall(r"required \d+/\d+ · optional \d+/\d+ · ", (ROOT / "sdk_docs" / page).read_text()):
            assert found == line, page


def test_a_check_that_cannot_be_run_is_not_run_and_says_why(kit: Kit) -> None:
    @check("plan.impossible/1", "protocol", "it holds", cause="nothing")
    def impossible(bench: Any) -> None:
        raise NotRun("a part is missing")

    outcome = kit._outcome(impossible)
    assert (outcome.status, outcome.reason) == ("not run", "a part is missing")


def test_an_outcome_survives_json(kit: Kit) -> None:
    from trivet.conformance import Outcome

    for id in ("plan.positions/1", "plan.impossible/1"):
        found = next((check for check in CHECKS if check.id == id), None)
        outcome = kit.run(found) if found else Outcome.of(CHECKS[0], "failed", failure=Failure(*["x"] * 0, **_FIELDS))
        assert Outcome.from_json(json.loads(json.dumps(outcome.as_json()))) == outcome


_FIELDS = dict.fromkeys(("contract", "observed", "expected", "cause", "rerun", "docs"), "x")
