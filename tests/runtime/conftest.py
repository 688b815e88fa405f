from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.runtimes import FAMILIES, make_checkpoint


@pytest.fixture(scope="session", params=FAMILIES)
def family_checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of each family, without a tokenizer."""
    return make_checkpoint(request.param, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dense checkpoint with a byte-level tokenizer."""
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("text"), tokenizer=True)
