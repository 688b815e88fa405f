from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.distributions import importable


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for distributions whose modules can be imported, and no selection of plugins."""
    monkeypatch.delenv("TRIVET_PLUGINS", raising=False)
    with importable(tmp_path):
        yield tmp_path
