"""``trivet warmup`` builds what is missing, says what it does, and leaves nothing running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trivet.attention.reference.path import ReferencePath

Run = Callable[..., Any]


def test_each_kernel_that_is_missing_is_built_and_named(trivet_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def builds(path: ReferencePath, capacity: object) -> list[tuple[str, Callable[[], object]]]:
        return [(name, lambda name=name: built.append(name)) for name in ("attention kernel", "append kernel")]

    monkeypatch.setattr(ReferencePath, "builds", builds, raising=False)
    outcome = trivet_command("warmup", "tiny-qwen3", "--device", "cpu", "--max-context", "64")
    assert outcome.code == 0 and built == ["attention kernel", "append kernel"]
    lines = outcome.out.splitlines()
    assert [line for line in lines if line.endswith("...")][1:3] == ["attention kernel ...", "append kernel ..."]
    assert lines[-1].startswith("ready after")


def test_a_kernel_that_cannot_be_built_ends_it_with_the_reason(
    trivet_command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def builds(path: ReferencePath, capacity: object) -> list[tuple[str, Callable[[], object]]]:
        def build() -> object:
            raise RuntimeError("no compiler")

        return [("attention kernel", build)]

    monkeypatch.setattr(ReferencePath, "builds", builds, raising=False)
    outcome = trivet_command("warmup", "tiny-qwen3", "--device", "cpu")
    assert outcome.code == 1 and "attention kernel" in outcome.err and "no compiler" in outcome.err
