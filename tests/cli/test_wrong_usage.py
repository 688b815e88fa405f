"""Exit codes are 0, 1 and 2; errors are one line on stderr, with a traceback only where it was asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import trivet

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generat", "text"], "No such command 'generat'"),
        (["generate"], "Missing argument 'PROMPT...'"),
        (["generate", "text", "--temperature", "-1"], "'--temperature'"),
        (["generate", "text", "--temperature", "nan"], "'--temperature'"),
        (["generate", "text", "--temperature", "inf"], "'--temperature'"),
        (["generate", "text", "--top-p", "nan"], "'--top-p'"),
        (["memory", "tiny-qwen3", "--memory-fraction", "nan"], "'--memory-fraction'"),
        (["generate", "text", "--max-new-tokens", "0"], "'--max-new-tokens'"),
        (["generate", "text", "--max-new-tokens", "many"], "'--max-new-tokens'"),
        (["generate", "text", "--top-p", "0"], "'--top-p'"),
        (["generate", "text", "--dtype", "int8"], "'--dtype'"),
        (["generate", "text", "--no-such-option"], "--no-such-option"),
        (["memory"], "Missing argument 'MODEL'"),
        (["memory", "tiny-qwen3", "--device-memory", "80G"], "'80G' is no size in bytes"),
        (["memory", "tiny-qwen3", "--max-requests", "0"], "'--max-requests'"),
        (["plugins", "extra"], "unexpected extra argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_exit_code_2_and_one_line(trivet_command: Run, arguments: list[str], expected: str) -> None:
    outcome = trivet_command(*arguments)
    assert outcome.code == 2 and outcome.out == ""
    assert expected in outcome.err and "--help" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "text", "--model", "no-such-directory"], "ConfigError: "),
        (["memory", "no-such-directory"], "ConfigError: "),
        (["memory", "tiny-qwen3", "--device", "no-such-gpu"], "no device profile named 'no-such-gpu'"),
        (["memory", "tiny-qwen3", "--device-memory", "1MiB", "--json"], "MemoryBudgetError: "),
        (["generate", "text", "--device", "cpu", "--memory-fraction", "1e-6"], "MemoryBudgetError: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_served_is_exit_code_1_and_one_line(
    trivet_command: Run, arguments: list[str], expected: str
) -> None:
    outcome = trivet_command(*arguments)
    assert outcome.code == 1 and outcome.out == ""
    assert outcome.err.startswith("trivet: ") and expected in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--debug", "memory", "nowhere"], ["memory", "nowhere", "--debug"]])
def test_debug_adds_the_traceback(trivet_command: Run, arguments: list[str]) -> None:
    outcome = trivet_command(*arguments)
    assert outcome.code == 1
    assert outcome.err.startswith("Traceback (most recent call last)")
    assert outcome.err.splitlines()[-1].startswith("trivet: ConfigError: ")


def test_a_bug_is_one_line_that_says_how_to_see_more(trivet_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(trivet, "plan_memory", broken)
    outcome = trivet_command("memory", "tiny-qwen3")
    assert outcome.code == 1
    assert outcome.err.startswith("trivet: ZeroDivisionError: two; lines; ") and "--debug" in outcome.err
    assert outcome.err.count("\n") == 1


def test_an_interrupt_is_one_line(trivet_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trivet, "plan_memory", interrupted)
    outcome = trivet_command("memory", "tiny-qwen3")
    assert outcome.code == 130 and "interrupted" in outcome.err and "Traceback" not in outcome.err


def test_no_command_shows_the_help_and_is_wrong_usage(trivet_command: Run) -> None:
    outcome = trivet_command()
    assert outcome.code == 2 and outcome.out == ""
    assert "generate" in outcome.err and "memory" in outcome.err and "plugins" in outcome.err


@pytest.mark.parametrize("command", [[], ["generate"], ["memory"], ["plugins"]])
def test_help_goes_to_stdout(trivet_command: Run, command: list[str]) -> None:
    outcome = trivet_command(*command, "--help")
    assert outcome.code == 0 and outcome.out.startswith("Usage: trivet") and outcome.err == ""


def test_the_module_and_the_script_are_the_same_command() -> None:
    done = subprocess.run([sys.executable, "-m", "trivet", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"trivet {trivet.__version__}\n")
    done = subprocess.run([sys.executable, "-m", "trivet", "memory", "nowhere"], capture_output=True, check=False)
    assert done.returncode == 1
