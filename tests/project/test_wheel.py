"""A wheel that is built from the tree holds what the tree has: its packages with their data, and nothing else."""

from __future__ import annotations

import configparser
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import trivet

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLUGIN_PACKAGES = sorted(path.parent for path in ROOT.glob("plugins/*/trivet_*/__init__.py"))
PACKAGES = [ROOT / "core" / "trivet", *PLUGIN_PACKAGES]
DIST_INFO = f"trivet-{trivet.__version__}.dist-info"

BUILD = """
import sys
from hatchling.build import build_wheel
build_wheel(sys.argv[1])
"""
"""What an installer asks of the build backend (PEP 517), without the installer and its package index."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the files of the wheel hold, by name."""
    pytest.importorskip("hatchling", reason="hatchling, the build backend, is not installed; `make test` installs it")
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    assert path.name == f"trivet-{trivet.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(wheel: dict[str, bytes]) -> None:
    tree = {
        file.relative_to(package.parent).as_posix()
        for package in PACKAGES
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {name for name in wheel if not name.startswith(f"{DIST_INFO}/")} == tree


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_type_checkers_are_told_that_the_package_is_typed(wheel: dict[str, bytes], package: Path) -> None:
    assert f"{package.name}/py.typed" in wheel


def test_the_wheel_announces_the_commands_and_plugins_of_the_project(wheel: dict[str, bytes]) -> None:
    announced = configparser.ConfigParser(delimiters="=")
    announced.optionxform = str  # type: ignore[assignment,method-assign]
    announced.read_string(wheel[f"{DIST_INFO}/entry_points.txt"].decode())
    groups = {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}
    assert {group: dict(announced[group]) for group in announced.sections()} == groups


def test_the_wheel_brings_the_licence_and_names_it(wheel: dict[str, bytes]) -> None:
    described = Parser().parsestr(wheel[f"{DIST_INFO}/METADATA"].decode())
    assert described["License-Expression"] == PROJECT["license"]
    assert described.get_all("License-File") == PROJECT["license-files"]
    assert wheel[f"{DIST_INFO}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
