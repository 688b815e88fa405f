"""`trivet doctor` says of every plugin whether it is sound, and what to do; it exits with 1 if one is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.distributions import FAMILIES, importable, install, working_family

from trivet.cli.main import main

V1 = {FAMILIES: {"x": "xs:plugin"}}
BUILD = "def build(geometry, parameters): ...\n"
MISSPELT = (
    "from trivet.plugin import hookimpl\n"
    "class P:\n    @hookimpl\n    def trivet_model_familes(self): return []\nplugin = P()\n"
)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("TRIVET_PLUGINS", raising=False)
    with importable(tmp_path):
        yield tmp_path


def doctor(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json"])
    return code, json.loads(capsys.readouterr().out)


def named(report: dict[str, Any], name: str) -> dict[str, Any]:
    (plugin,) = (plugin for plugin in report["plugins"] if plugin["name"] == name)
    return dict(plugin)


def test_sound_plugins_are_ready_with_their_families(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modules = {"toys": working_family("toy"), "toy": BUILD}
    install(site, "toys", {FAMILIES: {"toy": "toys:plugin"}}, modules)
    code, report = doctor(capsys)
    assert code == 0 and report["ok"]
    toy = named(report, "toy")
    assert (toy["status"], toy["api"], toy["distribution"], toy["version"]) == ("ready", 1, "toys", "1.0")
    assert [(family["name"], family["model_types"]) for family in toy["families"]] == [("toy", ["toy"])]
    assert named(report, "qwen3")["families"][0]["capabilities"]["prefix_cache"] is True


@pytest.mark.parametrize(
    ("groups", "source", "status", "phase", "says", "remedy"),
    [
        (V1, "import no_such_kernels\n", "failed", "import", "no_such", "pip install no_such"),
        (V1, "raise OSError('worn out')\n", "failed", "import", "worn out", "pip uninstall xs"),
        (V1, MISSPELT, "failed", "registration", "trivet_model_families", "pip uninstall xs"),
        ({FAMILIES: {"x": "not a target"}}, "", "failed", "metadata", "module:attribute", "pip uninstall xs"),
        ({"trivet.plugins.v7": {"x": "xs:plugin"}}, "raise SystemExit\n", "incompatible", None, "v7", "--upgrade xs"),
        ({"trivet.plugin": {"x": "xs:plugin"}}, "raise SystemExit\n", "incompatible", None, FAMILIES, "--upgrade xs"),
    ],
    ids=["missing module", "raises", "misspelt hook", "bad target", "other version", "misspelt group"],
)
def test_a_wrong_plugin_is_told_with_phase_error_and_remedy(
    groups: dict[str, dict[str, str]],
    source: str,
    status: str,
    phase: str | None,
    says: str,
    remedy: str,
    site: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(site, "xs", groups, {"xs": source})
    code, report = doctor(capsys)
    plugin = named(report, "x")
    assert code == 1 and not report["ok"]
    assert (plugin["status"], plugin["phase"]) == (status, phase)
    assert says in plugin["error"] and remedy in plugin["remedy"] and "\n" not in plugin["error"]
    assert named(report, "qwen3")["status"] == "ready"
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "remedy: " in said and said.splitlines()[-1].startswith("1 of ")


@pytest.mark.parametrize(
    ("source", "says", "remedy"),
    [
        ("", "x_model has no 'build'", "mend the source of xs"),
        ("build = 1", "expected a callable", "mend the source of xs"),
        ("from torch import Tensr", "importing x_model failed: ImportError", "mend the source of xs"),
        ("import no_such_kernels.fast", "No module named 'no_such_kernels'", "pip install no_such_kernels"),
    ],
    ids=["no such name", "no callable", "import error", "missing module"],
)
def test_a_family_whose_model_cannot_be_built_is_not_ready(
    source: str, says: str, remedy: str, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = working_family("x").replace("'x' + \":build\"", "'x_model:build'")
    install(site, "xs", V1, {"xs": family, "x_model": source})
    code, report = doctor(capsys)
    plugin = named(report, "x")
    assert code == 1 and (plugin["status"], plugin["phase"]) == ("failed", "validation")
    assert "field 'build'" in plugin["error"] and says in plugin["error"] and remedy in plugin["remedy"]
    assert [family["name"] for family in plugin["families"]] == ["x"]


def test_what_is_blocked_is_not_wrong_and_not_imported(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "xs", {FAMILIES: {"x": "xs:plugin"}}, {"xs": "raise AssertionError('imported')"})
    monkeypatch.setenv("TRIVET_PLUGINS", "-x,-nobody")
    code, report = doctor(capsys)
    assert code == 0 and named(report, "x")["status"] == "blocked"
    assert "TRIVET_PLUGINS" in named(report, "x")["remedy"]
    assert report["notes"] == ["TRIVET_PLUGINS names 'nobody', but no plugin is called that"]


def test_a_missing_optional_part_is_a_note_that_says_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = doctor(capsys)
    parts = {part["name"]: part for part in report["environment"]}
    assert code == 0
    assert {"Python", "torch", "CUDA", "FlashInfer", "compiler for JIT"} <= parts.keys()
    assert parts["torch"]["found"]
    assert all(part["found"] or part["note"] for part in parts.values())


def test_no_plugin_for_another_api_version_is_imported(site: Path) -> None:
    install(site, "xs", {"trivet.plugins.v2": {"x": "xs_next:plugin"}}, {"xs_next": "raise AssertionError"})
    script = (
        "import sys\nsys.path.insert(0, sys.argv[1])\nfrom trivet.cli import main\n"
        "code = main(['doctor'])\nassert 'xs_next' not in sys.modules\nsys.exit(10 + code)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(site)], check=False, timeout=120).returncode == 11


def test_a_plugin_that_prints_when_it_is_imported_leaves_one_json_object(site: Path) -> None:
    greeting = "import os\nprint('welcome')\nos.write(1, b'raw welcome')\n"
    install(site, "loud", {FAMILIES: {"loud": "loud:plugin"}}, {"loud": greeting + working_family("loud") + BUILD})
    command = [sys.executable, "-m", "trivet", "doctor", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert named(json.loads(done.stdout), "loud")["status"] == "ready"
    assert "welcome" in done.stderr and "raw welcome" in done.stderr


def test_nobody_is_told_to_remove_trivet_itself(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "other", {FAMILIES: {"qwen3": "other:plugin"}}, {"other": working_family("qwen3")})
    code, report = doctor(capsys)
    assert code == 1
    remedies = [plugin["remedy"] for plugin in report["plugins"] if plugin["name"] == "qwen3"]
    assert remedies and not any("uninstall trivet" in (remedy or "") for remedy in remedies)


@pytest.mark.parametrize(
    "source", ["this is no Python\n", "raise OSError('worn out')\n", MISSPELT], ids=["syntax", "import", "hook"]
)
def test_conform_reports_a_plugin_that_cannot_be_loaded(
    source: str, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "xs", V1, {"xs": source})
    record = site / "record.json"
    assert main(["conform", "x", "--json", str(record)]) == 1
    printed = capsys.readouterr().out
    assert "plugin.found-statically/1" in printed and "likely cause" in printed
    assert printed.splitlines()[-1].startswith("required 0/")
    kept = json.loads(record.read_text())
    assert not kept["passed"] and kept["plugin"]["distribution"] == "xs"
    statuses = [check["status"] for check in kept["checks"]]
    assert statuses[0] == "failed" and set(statuses[1:]) == {"not run"}


def test_a_version_that_is_not_the_tested_one_is_named_with_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    from trivet.cli.doctor import _part_lines
    from trivet.cli.environment import environment

    monkeypatch.setattr("trivet.installed.util.find_spec", lambda name: object())
    version_of = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.0" if name == "flashinfer-python" else version_of(name))
    (line,) = (line for line in _part_lines(environment()) if line.startswith("FlashInfer "))
    assert "0.5.0: " in line and "only " in line and "pip install '.[cuda]' in a clone of Trivet" in line


@pytest.mark.parametrize("built", [False, True])
def test_a_device_whose_triton_kernels_have_no_compiler_is_told_so(
    built: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from trivet.cli import environment

    monkeypatch.setattr(environment, "_version", lambda name: "3.6.0")
    monkeypatch.setattr(environment, "_sees_device", lambda: True)
    monkeypatch.setattr("trivet.installed.util.find_spec", lambda name: object())
    monkeypatch.setattr("trivet.installed._refused_by_triton", lambda: None if built else "RuntimeError: no compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    triton = environment._triton()
    assert triton.found == "3.6.0" and "install gcc" in triton.note
    assert ("only kernels that are in its cache" if built else "kernels written in it are not used") in triton.note
