"""A report says how much was run; what was not run, or fails, is never green."""

from __future__ import annotations

import json
import time
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.conformance.projects import around_qwen3

from trivet.cli.main import main
from trivet.conformance import CHECKS, Asked, Kit, Outcome
from trivet.conformance.record import closing_lines, count, junit, make_record, markdown, summary_line
from trivet.errors import PluginError

PINNED_LINE = "required 3/4 · optional 1/3 · declared unsupported 1 · not run 1"


def check_of(id: str) -> Any:
    return next(check for check in CHECKS if check.id == id)


def outcome(status: str, *, required: bool = True) -> Outcome:
    return Outcome(id="a.b/1", tier="protocol", required=required, capability=None, status=status)  # type: ignore[arg-type]


def test_the_summary_counts_required_optional_unsupported_and_not_run() -> None:
    outcomes = [outcome("passed")] * 3 + [outcome("not run")]
    outcomes += [outcome(status, required=False) for status in ("passed", "failed", "declared unsupported")]
    assert summary_line(count(outcomes)) == PINNED_LINE


def test_a_check_that_the_run_left_out_makes_it_red() -> None:
    with Kit(Asked("qwen3", ("protocol",))) as kit:
        check = check_of("plan.positions/1")
        record = make_record(kit, [kit.run(check)], "trivet conform qwen3", 1.0)
    assert record["passed"] is False
    assert record["counts"]["not_run"] == len(record["checks"]) - 1 > 40
    assert closing_lines(record)[-1] == record["summary"]
    assert "tier not reached: numerics (not asked for)" in closing_lines(record)
    assert f"{record['counts']['not_run']} checks (left out of this run)" in closing_lines(record)[0]


def test_without_an_oracle_the_numerics_are_not_run(tmp_path: Path) -> None:
    with around_qwen3(tmp_path, "mute", "oracle=None"), Kit(Asked("mute")) as kit:
        found = kit.run(check_of("numerics.prefill/1"))
    assert found.status == "not run" and "declares no oracle" in found.reason


def test_a_tier_asked_for_by_name_that_cannot_be_reached_is_not_run() -> None:
    with Kit(Asked("qwen3", ("checkpoint",))) as kit:
        assert {check.tier for check in kit.manifest()} == {"checkpoint"}
        assert all(kit.run(check).status == "not run" for check in kit.manifest())


def test_a_failed_gate_keeps_what_follows_from_being_run(tmp_path: Path) -> None:
    with around_qwen3(tmp_path, "untested", "tiny_configs={},"), Kit(Asked("untested")) as kit:
        gate = kit.run(check_of("plugin.tiny-models/1"))
        later = kit.run(check_of("plan.positions/1"))
    assert gate.status == "failed" and gate.failure is not None and "tiny_configs" in gate.failure.observed
    assert (later.status, later.reason) == ("not run", "plugin.tiny-models/1 failed")


UNSUPPORTED = "capabilities=Capabilities(prefix_cache=False, mixed_steps=False, chunked_prefill=False),"


def test_what_is_declared_unsupported_is_refused_and_counted(tmp_path: Path) -> None:
    with around_qwen3(tmp_path, "modest", UNSUPPORTED), Kit(Asked("modest")) as kit:
        outcomes = [kit.run(check) for check in kit.manifest()]
        record = make_record(kit, outcomes, "", 0.0)
    assert [(o.id, o.failure) for o in outcomes if o.status in ("failed", "not run")] == []
    unsupported = {o.id for o in outcomes if o.status == "declared unsupported"}
    assert unsupported == {o.id for o in outcomes if o.capability in ("prefix_cache", "mixed_steps", "chunked_prefill")}
    assert record["passed"] and record["counts"]["declared_unsupported"] == len(unsupported) > 6


def test_claiming_unsupported_and_serving_it_all_the_same_fails(tmp_path: Path, monkeypatch: Any) -> None:
    from trivet.plugin import ModelFamily

    with around_qwen3(tmp_path, "liar", "capabilities=Capabilities(prefix_cache=False),"), Kit(Asked("liar")) as kit:
        monkeypatch.setattr(ModelFamily, "require", lambda self, capability: None)
        found = kit.run(check_of("prefix.hit-length/1"))
    assert found.status == "failed" and found.failure is not None
    assert "ConfigError" in found.failure.expected and "ignored" in found.failure.cause


EXPECTED = """expected_failures=[
    ExpectedFailure("{check}", "the norm is taken from inside", "https://example.org/issues/7"),
],"""


def test_an_expected_failure_has_reason_and_link_and_is_no_failure(tmp_path: Path) -> None:
    changes = EXPECTED.format(check="plugin.public-imports/1")
    inside = "\nfrom trivet.plugin.family import ModelFamily\n"
    with around_qwen3(tmp_path, "known", changes, inside), Kit(Asked("known")) as kit:
        found = kit.run(check_of("plugin.public-imports/1"))
        record = make_record(kit, [kit.run(check) for check in kit.manifest()], "", 0.0)
    assert found.status == "expected failure" and "https://example.org/issues/7" in found.reason
    assert found.failure is not None and "trivet.plugin.family" in found.failure.observed
    counts = record["counts"]
    assert record["passed"] and counts["required_passed"] == counts["required"] - 1
    assert any(line.startswith("expected failure: plugin.public-imports/1 (the norm") for line in closing_lines(record))


def test_an_expected_failure_that_passes_fails(tmp_path: Path) -> None:
    changes = EXPECTED.format(check="plan.positions/1")
    with around_qwen3(tmp_path, "strict", changes), Kit(Asked("strict")) as kit:
        found = kit.run(check_of("plan.positions/1"))
    assert found.status == "failed" and found.failure is not None and "expected_failures" in found.failure.cause


def test_expecting_a_check_to_fail_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    changes = EXPECTED.format(check="plan.positions/9")
    with around_qwen3(tmp_path, "stale", changes), pytest.raises(PluginError, match=r"plan\.positions/9"):
        Kit(Asked("stale"))


def test_the_command_line_gives_the_record_junit_and_markdown_of_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file, junit_file, markdown_file = (tmp_path / name for name in ("r.json", "r.xml", "r.md"))
    files = ["--json", str(json_file), "--junit", str(junit_file), "--markdown", str(markdown_file)]
    assert main(["conform", "qwen3", "--tier", "protocol", *files]) == 0
    said = capsys.readouterr().out.splitlines()
    record = json.loads(json_file.read_text())
    assert said[-1] == record["summary"] and record["passed"] is True
    assert record["schema"] == "trivet.conformance/1" and record["model_type"] == "qwen3"
    assert "tier not reached: numerics (not asked for)" in said
    assert {"trivet", "torch", "python"} <= record["versions"].keys() and len(record["plugin"]["sha256"]) == 64
    assert record["command"] == "trivet conform qwen3 --seed 0 --tier protocol"
    assert sum(check["seconds"] for check in record["checks"]) <= record["seconds"] + 1
    suite = ElementTree.fromstring(junit_file.read_text()).find("testsuite")
    assert suite is not None and int(suite.get("tests", "0")) == len(record["checks"]) == len(list(suite))
    assert suite.get("failures") == "0"
    table = markdown_file.read_text()
    assert table == markdown(record) and all(f"`{check['id']}`" in table for check in record["checks"])
    assert junit_file.read_text() == junit(record)


def test_one_check_alone_is_told_from_a_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "qwen3", "--check", "plan.positions/1"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("passed") and said[-1].startswith("required 1/") and not said[-1].endswith("not run 0")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["no-such-type"], 1), (["qwen3", "--check", "plan.positions/2"], 2), (["qwen3", "--tier", "gpu"], 2), ([], 2)],
)
def test_wrong_usage_has_its_own_exit_code(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", *arguments]) == code
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_text"])
def test_the_protocol_tier_takes_less_than_twenty_seconds_of_a_processor(model_type: str) -> None:
    with Kit(Asked(model_type, ("protocol",))) as kit:
        started = time.process_time()
        for check in kit.manifest():
            assert kit.run(check).status == "passed", check.id
    assert time.process_time() - started < 20


def test_a_real_checkpoint_is_held_to_what_it_can_show(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(resources.files("trivet") / "models" / "tiny-qwen3")
    assert main(["conform", "qwen3", "--tier", "checkpoint", "--model", model]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1] == "required 2/2 · optional 1/1 · declared unsupported 0 · not run 0"
    )


def test_a_record_that_cannot_be_kept_is_refused_before_any_check_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    started = time.perf_counter()
    assert main(["conform", "qwen3", "--json", str(tmp_path / "file" / "record.json")]) == 1
    assert time.perf_counter() - started < 5
    assert "cannot be written" in capsys.readouterr().err


def test_a_check_outside_the_tiers_that_are_asked_for_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "qwen3", "--check", "numerics.prefill/1", "--tier", "protocol"]) == 2
    assert "numerics.prefill/1" in capsys.readouterr().err
