"""Memory is planned, plugins are found and the command line answers without importing torch, which takes seconds."""

from __future__ import annotations

import importlib.util
import pkgutil
import subprocess
import sys

import pytest

ROOMS = ("config", "geometry", "capacity", "layout", "reservation", "plugin", "cli")
"""Rooms that are free of torch as a whole, but for `EXCEPT`."""
EXCEPT = {"trivet.plugin.layers"}
MODULES = (
    "trivet",
    "trivet.errors",
    "trivet.checked",
    "trivet.dtypes",
    "trivet.attention",
    "trivet.attention.paths",
    "trivet.weights.map",
    "trivet.weights.standard",
    "trivet.sampling.params",
    "trivet.runtime.plan",
    "trivet_qwen3",
)


def torch_free_modules() -> list[str]:
    names = list(MODULES)
    for room in ROOMS:
        spec = importlib.util.find_spec(f"trivet.{room}")
        assert spec is not None and spec.submodule_search_locations is not None
        found = pkgutil.iter_modules(spec.submodule_search_locations, f"trivet.{room}.")
        names += [f"trivet.{room}", *(module.name for module in found if module.name not in EXCEPT)]
    return names


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_module_that_promises_to_be_free_of_torch_imports_it() -> None:
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' imports torch'\n"
    )
    run(script, *torch_free_modules())


def test_importing_trivet_imports_none_of_its_rooms() -> None:
    loaded = run("import sys, trivet; print(*(name for name in sys.modules if name.startswith('trivet')))")
    assert loaded.split() == ["trivet"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["memory", "tiny-qwen3", "--device-memory", "1GiB", "--json"],
        ["memory", "tiny-qwen3", "--device", "h200"],
        ["plugins", "--json"],
        ["generate", "--model", "a-directory-that-is-not-there", "text"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_command_that_runs_no_model_does_not_import_torch(arguments: list[str]) -> None:
    script = "import sys\nfrom trivet.cli import main\nmain(sys.argv[1:])\nassert 'torch' not in sys.modules\n"
    run(script, *arguments)


def test_planning_memory_does_not_import_torch() -> None:
    run("import sys, trivet; trivet.plan_memory('tiny-qwen3', device='h200'); assert 'torch' not in sys.modules")
