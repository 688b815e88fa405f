"""Installed distributions as they lie on disk, made by tests: metadata with entry points, and modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

FAMILIES = "trivet.plugins.v1"
BACKENDS = "trivet.backends.v1"
OBSERVERS = "trivet.observers.v1"

WORKING_FAMILY = """
from trivet.plugin import ModelFamily, WeightMap, hookimpl

def read_geometry(document):
    raise NotImplementedError

def weight_map(geometry):
    return WeightMap(())

class Plugin:
    @hookimpl
    def trivet_model_families(self):
        return [ModelFamily(name={name!r}, model_types=({types}), read_geometry=read_geometry,
                            weight_map=weight_map, build={name!r} + ":build")]

plugin = Plugin()
"""


def working_family(name: str, *model_types: str) -> str:
    """The source of a module whose `plugin` brings one family, serving `model_types` (by default its name)."""
    types = "".join(f"{model_type!r}, " for model_type in model_types or (name,))
    return WORKING_FAMILY.format(name=name, types=types)


def install(
    site: Path,
    distribution: str,
    entry_points: Mapping[str, Mapping[str, str]] | str = "",
    modules: Mapping[str, str] | None = None,
    version: str = "1.0",
    metadata: str | None = None,
) -> None:
    """Lay out a distribution in the folder `site`.

    Args:
        entry_points: group to name to target, or the text of entry_points.txt as it stands.
        modules: module name to source.
        metadata: text of METADATA; None: a proper one.
    """
    folder = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    if metadata is None:
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata)
    if not isinstance(entry_points, str):
        entry_points = "".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in named.items())
            for group, named in entry_points.items()
        )
    (folder / "entry_points.txt").write_text(entry_points)
    for name, source in (modules or {}).items():
        (site / f"{name}.py").write_text(source)


@contextmanager
def importable(site: Path) -> Iterator[None]:
    """Let modules in `site` be imported, and forget them afterwards."""
    sys.path.insert(0, str(site))
    try:
        yield
    finally:
        sys.path.remove(str(site))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(site)):
                del sys.modules[name]
