"""The command line, the pytest plugin and the test class run the same checks under the same ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trivet.conformance import Asked, FamilyConformance, Kit

CLASS = """
from trivet.conformance import FamilyConformance

class TestQwen3(FamilyConformance):
    model_type = "qwen3"
    tiers = ("protocol",)
"""


def run_pytest(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]


def manifest() -> list[str]:
    with Kit(Asked("qwen3", ("protocol",))) as kit:
        return [check.id for check in kit.manifest()]


def test_the_plugin_collects_the_manifest_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_other(): raise AssertionError")
    options = ["-p", "trivet.conformance", "--trivet-family", "qwen3", "--trivet-tier", "protocol", "-q"]
    code, said = run_pytest(tmp_path, *options, "--collect-only")
    assert code == 0
    assert [line.partition("::")[2] for line in said if "::" in line] == manifest()


@pytest.mark.slow
def test_the_plugin_ends_with_the_summary_and_writes_the_record(tmp_path: Path) -> None:
    options = ["-p", "trivet.conformance", "--trivet-family", "qwen3", "--trivet-tier", "protocol", "-q"]
    code, said = run_pytest(tmp_path, *options, "--trivet-json", "record.json", "-n", "2")
    record = json.loads((tmp_path / "record.json").read_text())
    assert code == 0 and said[-1] == record["summary"] and record["passed"]
    assert [check["id"] for check in record["checks"]] == manifest()


def test_the_class_collects_the_same_ids(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(CLASS)
    code, said = run_pytest(tmp_path, "-p", "trivet.conformance", "-q", "--collect-only", "test_mine.py")
    assert code == 0
    assert [line.partition("TestQwen3::")[2] for line in said if "::" in line] == manifest()


def test_deselecting_checks_is_never_green(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(CLASS)
    code, said = run_pytest(tmp_path, "-p", "trivet.conformance", "-q", "-k", "capacity.pure", "test_mine.py")
    assert code == 1 and said[-1].startswith("required 1/") and not said[-1].endswith("not run 0")


def test_a_class_whose_checks_were_not_collected_fails(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(CLASS)
    code, said = run_pytest(tmp_path, "-q", "test_mine.py")
    assert code == 1 and any("-p trivet.conformance" in line for line in said)


def test_a_family_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    code, said = run_pytest(tmp_path, "-p", "trivet.conformance", "--trivet-family", "nobody")
    assert code == 4 and any("no plugin serves model_type 'nobody'" in line for line in said)


@pytest.mark.parametrize("name", ["test_conforms", "runtest", "CHECKS", "test_needs_the_pytest_plugin", "skip"])
def test_a_class_that_overrides_or_removes_anything_cannot_be_made(name: str) -> None:
    with pytest.raises(TypeError, match="cannot be removed or overridden"):
        type("Mine", (FamilyConformance,), {"model_type": "qwen3", name: None})


def test_a_class_without_a_model_type_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="no model_type"):
        type("Mine", (FamilyConformance,), {})


def test_importing_the_package_imports_neither_torch_nor_pytest() -> None:
    script = "import sys, trivet.conformance; assert not {'torch', 'pytest'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    "properties",
    [{"tiers": ("protocl",)}, {"tiers": ()}, {"tiers": "numerics"}, {"seed": "x"}, {"seed": True}],
    ids=repr,
)
def test_a_class_that_asks_for_what_is_not_there_cannot_be_made(properties: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=next(iter(properties))):
        type("TestMine", (FamilyConformance,), {"model_type": "qwen3", **properties})


def test_a_class_may_name_its_tiers_in_a_list() -> None:
    made = type("TestMine", (FamilyConformance,), {"model_type": "qwen3", "tiers": ["protocol"]})
    assert made.tiers == ("protocol",)
