"""``trivet generate`` gives what the runtime gives: to machines as JSON alone on stdout, to people as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trivet

Run = Callable[..., Any]
PROMPTS = ["Once upon a time", "The cat"]
FIELDS = ["text", "token_ids", "finish_reason", "prompt_tokens", "cached_tokens"]


@pytest.fixture(scope="module")
def completions() -> list[trivet.Completion]:
    with trivet.Runtime.load("tiny-qwen3", device="cpu") as runtime:
        return list(runtime.generate(PROMPTS, trivet.Sampling(max_new_tokens=6)))


def test_json_is_one_compact_object_per_prompt_on_stdout_alone(
    trivet_command: Run, completions: list[trivet.Completion]
) -> None:
    outcome = trivet_command("generate", "--device", "cpu", "--json", "--max-new-tokens", "6", *PROMPTS)
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert len(lines) == len(PROMPTS)
    for line, completion in zip(lines, completions, strict=True):
        found = json.loads(line)
        assert list(found) == FIELDS
        assert line == json.dumps(found, separators=(",", ":"))
        assert found["token_ids"] == list(completion.token_ids) and found["text"] == completion.text
        assert found["finish_reason"] == completion.finish_reason == "length"
        assert found["prompt_tokens"] == completion.prompt_tokens


def test_people_see_each_prompt_with_its_continuation(
    trivet_command: Run, completions: list[trivet.Completion]
) -> None:
    outcome = trivet_command("generate", "--device", "cpu", "--max-new-tokens", "6", *PROMPTS)
    assert outcome.out == "".join(f"{p}{c.text}\n" for p, c in zip(PROMPTS, completions, strict=True))


def test_stats_show_speed_and_the_ledger_s_total(trivet_command: Run) -> None:
    outcome = trivet_command("generate", "--device", "cpu", "--stats", "--max-new-tokens", "3", PROMPTS[0])
    assert re.search(r"\b\d+(\.\d+)? tok/s\b", outcome.out)
    assert re.search(r"^total +\d", outcome.out, re.MULTILINE)


def test_stats_leave_stdout_to_the_json(trivet_command: Run) -> None:
    outcome = trivet_command("generate", "--device", "cpu", "--stats", "--json", "--max-new-tokens", "3", PROMPTS[0])
    assert list(json.loads(outcome.out)) == FIELDS
    assert "tok/s" in outcome.err


def test_chat_answers_through_the_template(trivet_command: Run) -> None:
    outcome = trivet_command("generate", "--device", "cpu", "--chat", "--json", "--max-new-tokens", "5", "Who are you?")
    with trivet.Runtime.load("tiny-qwen3", device="cpu") as runtime:
        sampling = trivet.Sampling(max_new_tokens=5)
        expected = runtime.chat([{"role": "user", "content": "Who are you?"}], sampling)
    found = json.loads(outcome.out)
    assert found["token_ids"] == list(expected.token_ids) and found["prompt_tokens"] == expected.prompt_tokens


def test_sampling_options_reach_the_runtime(trivet_command: Run) -> None:
    options = ["--temperature", "0.8", "--top-k", "50", "--top-p", "0.9", "--seed", "7", "--max-new-tokens", "8"]
    outcome = trivet_command("generate", "--device", "cpu", "--json", *options, PROMPTS[0])
    sampling = trivet.Sampling(max_new_tokens=8, temperature=0.8, top_k=50, top_p=0.9, seed=7)
    with trivet.Runtime.load("tiny-qwen3", device="cpu") as runtime:
        (expected,) = runtime.generate([PROMPTS[0]], sampling)
    assert json.loads(outcome.out)["token_ids"] == list(expected.token_ids)


def test_a_stop_text_ends_the_request(trivet_command: Run, completions: list[trivet.Completion]) -> None:
    stop = completions[0].text[2:5]
    outcome = trivet_command("generate", "--device", "cpu", "--json", "--stop", stop, PROMPTS[0])
    found = json.loads(outcome.out)
    assert found["finish_reason"] == "stop" and stop not in found["text"]


def test_random_weights_are_announced_on_stderr(trivet_command: Run) -> None:
    outcome = trivet_command("generate", "--device", "cpu", "--weights", "random", "--max-new-tokens", "1", "x")
    assert outcome.code == 0 and "the text is noise" in outcome.err


@pytest.mark.parametrize("marked", [True, False])
def test_a_checkpoint_that_says_its_weights_are_random_is_announced(
    trivet_command: Run, tmp_path: Path, marked: bool
) -> None:
    import shutil

    directory = tmp_path / "checkpoint"
    shutil.copytree(Path(str(trivet.__file__)).parent / "models" / "tiny-qwen3", directory)
    config = json.loads((directory / "config.json").read_text())
    config.pop("trivet_weights", None)
    if marked:
        config["trivet_weights"] = "random"
    (directory / "config.json").write_text(json.dumps(config))
    outcome = trivet_command("generate", "--device", "cpu", "--model", str(directory), "--max-new-tokens", "1", "x")
    assert outcome.code == 0
    assert ("random weights" in outcome.err) == marked


def test_a_request_that_can_never_fit_is_exit_code_1(trivet_command: Run) -> None:
    outcome = trivet_command("generate", "--device", "cpu", "--max-context", "8", "--max-new-tokens", "64", "x")
    assert outcome.code == 1 and outcome.out == ""
    assert outcome.err.splitlines()[-1].startswith("trivet: RequestRejected: ")


def test_a_request_that_fails_is_exit_code_1_and_named(trivet_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import attrs

    completion = trivet.Request.completion.fget

    def failing(request: trivet.Request) -> trivet.Completion:
        given = completion(request)
        if request.id:
            return given
        return attrs.evolve(given, finish_reason="error", error=RuntimeError("lost a device"))

    monkeypatch.setattr(trivet.Request, "completion", property(failing))
    outcome = trivet_command("generate", "--device", "cpu", "--json", "--max-new-tokens", "2", *PROMPTS)
    assert outcome.code == 1 and len(outcome.out.splitlines()) == 2
    assert "'Once upon a time' ended as error: RuntimeError: lost a device" in outcome.err


def test_several_chats_run_side_by_side_and_answer_in_order(trivet_command: Run) -> None:
    questions = ["Who are you?", "What is red?", "Where is the cat?"]
    arguments = ("--device", "cpu", "--chat", "--json", "--max-new-tokens", "4")
    together = trivet_command("generate", *arguments, *questions).out.splitlines()
    alone = [trivet_command("generate", *arguments, question).out.strip() for question in questions]
    assert [json.loads(line)["token_ids"] for line in together] == [json.loads(line)["token_ids"] for line in alone]
