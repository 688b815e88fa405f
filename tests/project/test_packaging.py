"""The distribution holds what it must, and its parts say the same: packages, entry points, pins, lint contracts."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trivet

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PLUGIN_PACKAGES = sorted(path.parent for path in (ROOT / "plugins").glob("*/trivet_*/__init__.py"))


def pins() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    exact = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines if line]
    assert all(exact), "every line of constraints.txt pins one version"
    return {canonicalize_name(match[1]): match[2] for match in exact if match}


def test_the_installed_version_is_the_package_s() -> None:
    assert metadata.version("trivet") == trivet.__version__


@pytest.mark.parametrize("extra", ["", "test", "dev"])
def test_the_constraints_pin_all_that_make_installs(extra: str) -> None:
    pinned = pins()
    missing: set[str] = set()
    seen: set[tuple[str, str]] = set()
    pending = [("trivet", extra)]
    while pending:
        name, wanted = pending.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # pinned, but not installed here: the dev extra after `make test` alone
        for requirement in map(Requirement, requirements):
            if requirement.marker is None or requirement.marker.evaluate({"extra": wanted}):
                found = canonicalize_name(requirement.name)
                missing |= {found} - set(pinned)
                pending += [(found, each) for each in ("", *requirement.extras)]
    # A CUDA build of torch brings these along; torch's own requirements settle their versions.
    assert {name for name in missing if not name.startswith(("nvidia-", "cuda-", "triton"))} == set()


def test_torch_is_pinned_without_a_local_version() -> None:
    assert pins()["torch"] == "2.13.0"


@pytest.mark.parametrize("package", PLUGIN_PACKAGES, ids=lambda path: path.name)
def test_each_shipped_plugin_is_packaged_found_and_linted(package: Path) -> None:
    relative = package.relative_to(ROOT)
    hatch, linter = PROJECT["tool"]["hatch"]["build"], PROJECT["tool"]["importlinter"]
    assert str(relative) in hatch["targets"]["wheel"]["packages"]
    assert str(relative.parent) in hatch["dev-mode-dirs"]
    targets = PROJECT["project"]["entry-points"]["trivet.plugins.v1"].values()
    assert f"{package.name}:plugin" in targets
    assert package.name in linter["root_packages"]
    core, plugins, _ = linter["contracts"]
    assert package.name in core["forbidden_modules"] and package.name in plugins["source_modules"]
    assert str(relative) in PROJECT["tool"]["mypy"]["files"]


def test_make_installs_anew_when_the_version_changes() -> None:
    manifests = re.search(r"^MANIFESTS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert manifests is not None
    assert set(manifests[1].split()) >= {
        "pyproject.toml",
        "constraints.txt",
        PROJECT["tool"]["hatch"]["version"]["path"],
    }
