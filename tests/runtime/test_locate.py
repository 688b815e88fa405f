"""A checkpoint is found by directory, by the name of a shipped model, or by its id in the hub's local cache."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.runtimes import make_checkpoint

import trivet
from trivet.runtime.locate import EMBEDDED, locate_checkpoint

huggingface_hub = pytest.importorskip("huggingface_hub", reason="transformers brings it with the test extra")

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder as the hub's client lays it out, holding ``Somebody/Tiny-1``; nothing can be downloaded."""
    cache = tmp_path / "hub"
    repository = cache / "models--Somebody--Tiny-1"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    snapshot = repository / "snapshots" / REVISION
    blobs = repository / "blobs"
    blobs.mkdir()
    for file in make_checkpoint("qwen3", tmp_path / "made").iterdir():
        blob = blobs / f"blob-of-{file.name}"
        blob.write_bytes(file.read_bytes())
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return cache


def test_an_id_in_the_local_cache_is_served_without_the_network(hub_cache: Path) -> None:
    limits = trivet.Limits(2, 16, 32, 4)
    with trivet.Runtime.load("Somebody/Tiny-1", device="cpu", limits=limits, autostart=False) as runtime:
        assert len(runtime.generate([[1, 2]], trivet.Sampling(max_new_tokens=3))[0].token_ids) == 3
    assert trivet.plan_memory("Somebody/Tiny-1", limits=limits).total_bytes > 0


def test_an_id_that_is_nowhere_says_so(hub_cache: Path) -> None:
    with pytest.raises(trivet.ConfigError, match=r"Somebody/Else.*could not be downloaded"):
        locate_checkpoint("Somebody/Else")


def test_without_the_extra_the_error_names_it(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(trivet.ConfigError, match=r"\.\[hub\]"):
        locate_checkpoint("Somebody/Tiny-1")


def test_a_directory_of_that_name_comes_before_the_hub(hub_cache: Path) -> None:
    here = Path("Somebody/Tiny-1")
    here.mkdir(parents=True)
    assert locate_checkpoint("Somebody/Tiny-1") == here


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_shipped_name_is_not_shadowed_by_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    assert (locate_checkpoint(name) / "config.json").is_file()


@pytest.mark.parametrize("checkpoint", [None, 3, ["x"], ""])
def test_what_is_no_path_is_refused(checkpoint: Any) -> None:
    with pytest.raises(trivet.ConfigError, match="expected a directory"):
        locate_checkpoint(checkpoint)
