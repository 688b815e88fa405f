"""What goes wrong beside a command is a line on stderr, and a traceback only where it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.support.distributions import OBSERVERS, importable, install
from tests.support.runtimes import make_checkpoint

Run = Callable[..., Any]
FEW = ("--device", "cpu", "--max-new-tokens", "2", "--max-context", "32")

OBSERVER = """
from trivet.plugin import hookimpl

class Observer:
    @hookimpl
    def trivet_observe_step(self, report): raise ValueError("cannot count")

plugin = Observer()
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a tokenizer, in which token "Q" embeds to NaN."""
    directory = make_checkpoint("qwen3", tmp_path_factory.mktemp("poisoned"), tokenizer=True)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][ord("Q") - ord("!")] = float("nan")  # ids follow the printable bytes
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


@pytest.fixture
def failing_observer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRIVET_PLUGINS", raising=False)
    install(tmp_path, "noisy", {OBSERVERS: {"noisy": "noisy_observer:plugin"}}, {"noisy_observer": OBSERVER})
    with importable(tmp_path):
        yield


def test_a_request_that_fails_is_one_line_and_exit_code_1(trivet_command: Run, checkpoint: Path) -> None:
    outcome = trivet_command("generate", "--model", str(checkpoint), *FEW, "--json", "a", "Q", "b")
    assert outcome.code == 1 and outcome.out.count("\n") == 3
    assert outcome.err.startswith("trivet: 'Q' ended as error: ") and outcome.err.count("\n") == 1


@pytest.mark.usefixtures("failing_observer")
def test_an_observer_that_fails_is_one_line_and_the_answer_stands(trivet_command: Run, checkpoint: Path) -> None:
    outcome = trivet_command("generate", "--model", str(checkpoint), *FEW, "--json", "a")
    assert outcome.code == 0 and outcome.out.count("\n") == 1
    assert "cannot count" in outcome.err and outcome.err.count("\n") == 1


@pytest.mark.usefixtures("failing_observer")
def test_debug_shows_the_traceback_of_an_observer_that_fails(trivet_command: Run, checkpoint: Path) -> None:
    outcome = trivet_command("generate", "--model", str(checkpoint), *FEW, "--debug", "a")
    assert outcome.code == 0
    assert "Traceback" in outcome.err and "cannot count" in outcome.err
