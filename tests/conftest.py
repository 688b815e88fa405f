"""Plugins that happen to be installed beside Trivet, such as those its own pages make, are no part of its tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

import pytest

from trivet.cli import new_plugin
from trivet.plugin import discovery


@pytest.fixture(scope="session", autouse=True)
def only_our_plugins() -> Iterator[None]:
    """Hide in this process what is there before any test installs something: entry points, and their packages."""
    others = {
        (found.name, str(found.locate_file(""))): {re.split("[.:]", e.value)[0] for e in found.entry_points}
        for found in discovery._distributions(None)
        if found.name != "trivet"
    }
    packages = set().union(*others.values())
    every = discovery._distributions

    def ours(path: list[str] | None) -> Iterator[metadata.Distribution]:
        return (found for found in every(path) if (found.name, str(found.locate_file(""))) not in others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "_distributions", ours)
        patch.setattr(new_plugin, "find_spec", lambda name: None if name in packages else find_spec(name))
        yield
