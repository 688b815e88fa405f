"""Plugins on disk for these tests: as `trivet new-plugin` writes them, or around a shipped family."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.distributions import FAMILIES, importable, install

from trivet.cli.new_plugin import write_plugin

AROUND_QWEN3 = """
import attrs
from trivet.plugin import Capabilities, ExpectedFailure, hookimpl
import trivet_qwen3

FAMILY = attrs.evolve(
    trivet_qwen3.FAMILY,
    name={name!r},
    model_types=({name!r},),
    tiny_configs={{k: {{**v, "model_type": {name!r}}} for k, v in trivet_qwen3.FAMILY.tiny_configs.items()}},
)
FAMILY = attrs.evolve(FAMILY, {changes})

class Plugin:
    @hookimpl
    def trivet_model_families(self):
        return [FAMILY]

plugin = Plugin()
"""


@contextmanager
def project(folder: Path, name: str) -> Iterator[Path]:
    """A project of the template, found as if it were installed."""
    write_plugin(name, folder)
    package = "trivet_" + name.replace("-", "_")
    install(folder, package.replace("_", "-"), {FAMILIES: {name: f"{package}:plugin"}})
    with importable(folder):
        yield folder / package


@contextmanager
def around_qwen3(folder: Path, name: str, changes: str = "", source: str = "") -> Iterator[None]:
    """A family like Qwen3 but for `changes`, keyword arguments of ModelFamily as Python text."""
    folder.mkdir(exist_ok=True)
    module = f"{name}_plugin"
    text = AROUND_QWEN3.format(name=name, changes=changes) + source
    install(folder, f"{name}-dist", {FAMILIES: {name: f"{module}:plugin"}}, {module: text})
    with importable(folder):
        yield
