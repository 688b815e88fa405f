"""`trivet new-plugin` writes a distribution that works as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from tests.conformance.projects import project

import trivet
from trivet.cli.main import main
from trivet.conformance import Asked, Kit
from trivet.plugin import ConfigDocument, PluginManager

ROOT = Path(__file__).parents[2]
MOST_LINES = 150


def test_the_template_conforms_with_nothing_not_run(tmp_path: Path) -> None:
    with project(tmp_path / "sprout", "sprout"), Kit(Asked("sprout")) as kit:
        outcomes = [kit.run(check) for check in kit.manifest()]
    assert [(o.id, o.failure or o.reason) for o in outcomes if o.status != "passed"] == []
    assert sum(o.tier == "numerics" for o in outcomes) >= 10


@pytest.mark.parametrize("eps", [-1e-6, -1.0, 1.5, 1e30])
def test_the_template_refuses_an_epsilon_that_no_norm_has(eps: float, tmp_path: Path) -> None:
    with project(tmp_path / "sprout", "sprout"):
        family = PluginManager.discover().family_for("sprout")
        config = {**family.tiny_configs["plain"], "rms_norm_eps": eps}
        with pytest.raises(trivet.ConfigError, match=r"config\.json: 'rms_norm_eps' is .*expected a finite number"):
            family.read_geometry(ConfigDocument(config))


def test_the_template_generates_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with project(tmp_path / "sprout", "sprout"):
        tiny = str(tmp_path / "sprout" / "tiny")
        arguments = ["--model", tiny, "--weights", "random", "--device", "cpu", "--max-new-tokens", "8"]
        assert main(["generate", *arguments, "Once upon a time"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Once upon a time") and len(said) > len("Once upon a time\n")


def test_a_family_is_at_most_150_lines(tmp_path: Path) -> None:
    assert main(["new-plugin", "sprout", str(tmp_path / "p")]) == 0
    files = (tmp_path / "p" / "trivet_sprout").glob("*.py")
    assert 50 < sum(len(file.read_text().splitlines()) for file in files) <= MOST_LINES


@pytest.mark.parametrize(
    ("name", "package"), [("gpt", "trivet_gpt"), ("My-Model.2", "trivet_my_model_2"), ("a_b", "trivet_a_b")]
)
def test_the_project_is_named_after_its_model_type(name: str, package: str, tmp_path: Path) -> None:
    assert main(["new-plugin", name, str(tmp_path / "p")]) == 0
    written = tomllib.loads((tmp_path / "p" / "pyproject.toml").read_text())["project"]
    assert written["entry-points"]["trivet.plugins.v1"] == {name: f"{package}:plugin"}
    assert written["name"] == package.replace("_", "-")
    names = {str(path.relative_to(tmp_path / "p")) for path in (tmp_path / "p").rglob("*") if path.is_file()}
    expected = ("__init__.py", "model.py", "oracle.safetensors")
    assert names >= {f"{package}/{file}" for file in expected} | {"README.md", ".gitignore", "tiny/config.json"}
    assert names >= {".github/workflows/ci.yml", "tests/test_conformance.py", "tests/reference.py"}
    for path in (tmp_path / "p").rglob("*.py"):
        compile(path.read_text(), str(path), "exec")
    workflow = (tmp_path / "p" / ".github/workflows/ci.yml").read_text()
    assert "${{ matrix.python }}" in workflow
    assert written["optional-dependencies"] == {"test": []} and "pip install wheels/trivet-*.whl '.[test]'" in workflow


@pytest.mark.parametrize("name", ["", "two words", "../up", "-dash", "a/b"])
def test_a_name_that_cannot_be_a_model_type_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-plugin", "--", name, str(tmp_path / "p")]) == 1
    assert "plugin name" in capsys.readouterr().err and not (tmp_path / "p").exists()


def test_a_directory_that_holds_something_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["new-plugin", "sprout", str(tmp_path)]) == 1
    assert "expected a new or an empty directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_stored_numbers_are_those_of_the_reference_that_the_template_carries(tmp_path: Path) -> None:
    with project(tmp_path / "sprout", "sprout") as package:
        stored = (package / "oracle.safetensors").read_bytes()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "sprout"), *filter(None, sys.path)])}
        command = [sys.executable, "-m", "tests.reference"]
        subprocess.run(command, cwd=tmp_path / "sprout", env=environment, check=True, timeout=120)
        assert (package / "oracle.safetensors").read_bytes() == stored


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_template_installs_beside_the_wheel_in_a_fresh_environment(tmp_path: Path) -> None:
    def run(*command: str, cwd: Path = tmp_path) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        constraints = str(ROOT / "constraints.txt")
        environment |= {"PIP_CONSTRAINT": constraints, "PIP_BUILD_CONSTRAINT": constraints, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    wheels = ("--wheel-dir", str(tmp_path / "wheels"))
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *wheels, str(ROOT))
    (wheel,) = (tmp_path / "wheels").glob("trivet-*.whl")
    assert main(["new-plugin", "sprout", str(tmp_path / "project")]) == 0
    venv.create(tmp_path / "fresh", with_pip=True)
    binaries = tmp_path / "fresh" / "bin"
    run(str(binaries / "python"), "-m", "pip", "install", "--quiet", str(wheel), str(tmp_path / "project"))
    assert "sprout" in run(str(binaries / "trivet"), "doctor")
    said = run(str(binaries / "trivet"), "conform", "sprout").splitlines()
    assert said[-1].startswith("required") and said[-1].endswith("not run 0")
    assert run(str(binaries / "python"), "-m", "pytest", "-q", cwd=tmp_path / "project").splitlines()[-1] == said[-1]


@pytest.mark.parametrize("name", ["qwen3", "x" * 300])
def test_a_name_that_would_take_the_place_of_another_package_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-plugin", name, str(tmp_path / "made")]) == 1
    assert "plugin name" in capsys.readouterr().err and not (tmp_path / "made").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["new-plugin", "mine", str(tmp_path / "file" / "made")]) == 1
    assert "cannot be made" in capsys.readouterr().err
