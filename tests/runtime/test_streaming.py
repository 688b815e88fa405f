"""Streamed text is whole characters, holds back what may still change, and ends where it must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import trivet

LIMITS = trivet.Limits(max_requests=4, max_step_tokens=64, max_context=200, page_size=4)


@pytest.fixture
def scripted(text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> trivet.Runtime:
    """A runtime whose model says, whatever the prompt, the bytes of `runtime.script` and then token 0 for ever."""
    with trivet.Runtime.load(text_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:
        engine = runtime._engine
        model = engine.model
        runtime.script = []

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(hidden.shape[0], 300)
            running = engine.scheduler.running
            for row, request in enumerate(running[: hidden.shape[0]]):
                place = request.new_tokens
                out[row, runtime.script[place] if place < len(runtime.script) else 0] = 50.0
            return out

        monkeypatch.setattr(model, "logits", logits)
        yield runtime


def says(runtime: trivet.Runtime, text: str | bytes) -> list[int]:
    """Script the model to say `text`, a byte per token."""
    assert runtime.tokenizer is not None
    data = text.encode() if isinstance(text, str) else text
    alphabet = {b: runtime.tokenizer.encode(bytes([b]).decode("latin-1"))[-1] for b in range(128)}
    import tokenizers

    order = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_of, extra = {}, 0
    for byte in range(256):
        if byte in printable:
            byte_of[byte] = chr(byte)
        else:
            byte_of[byte] = chr(256 + extra)
            extra += 1
    ids = [order.index(byte_of[byte]) for byte in data]
    assert all(ids[i] == alphabet[b] for i, b in enumerate(data) if b < 128)
    runtime.script = ids
    return ids


TEXT = "naïve café – 数学 🦊🦊 done"


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_text_never_ends_inside_a_character_and_adds_up(stop: tuple[str, ...], scripted: trivet.Runtime) -> None:
    ids = says(scripted, TEXT)
    tokens = list(scripted.stream([5], trivet.Sampling(max_new_tokens=len(ids), stop=stop)))
    assert [token.token_id for token in tokens] == ids
    assert "".join(token.text for token in tokens) == TEXT
    assert all("\ufffd" not in token.text for token in tokens)
    assert [token.finish_reason for token in tokens] == [None] * (len(ids) - 1) + ["length"]
    out = scripted.generate([[5]], trivet.Sampling(max_new_tokens=len(ids), stop=stop))[0]
    assert out.text == TEXT


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_what_is_withheld_at_the_end_is_released_with_the_last_token(
    stop: tuple[str, ...], scripted: trivet.Runtime
) -> None:
    ids = says(scripted, "ab🦊".encode()[:-1])
    tokens = list(scripted.stream([5], trivet.Sampling(max_new_tokens=len(ids), stop=stop)))
    assert "".join(token.text for token in tokens) == "ab\ufffd" == scripted.tokenizer.decode(ids)
    assert tokens[-1].text == "\ufffd"


def test_a_stop_string_over_several_tokens_is_removed_and_one_that_only_begins_is_released(
    scripted: trivet.Runtime,
) -> None:
    says(scripted, "one sto two STOP three")
    tokens = list(scripted.stream([5], trivet.Sampling(max_new_tokens=40, stop=("stop", "STOP"))))
    assert "".join(token.text for token in tokens) == "one sto two "
    assert tokens[-1].finish_reason == "stop"
    assert len(tokens) == len("one sto two STOP")
    assert all("S" not in token.text for token in tokens)


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop(scripted: trivet.Runtime) -> None:
    says(scripted, "go END")
    out = scripted.generate([[5]], trivet.Sampling(max_new_tokens=6, stop="END"))[0]
    assert (out.finish_reason, out.text, len(out.token_ids)) == ("stop", "go ", 6)


def test_the_prompt_never_leaks_into_text_or_stop_matching(scripted: trivet.Runtime) -> None:
    says(scripted, "P after")
    out = scripted.generate(["STO"], trivet.Sampling(max_new_tokens=7, stop="STOP"))[0]
    assert (out.text, out.finish_reason) == ("P after", "length")


def test_ids_beyond_the_tokenizer_decode_to_nothing(scripted: trivet.Runtime) -> None:
    ids = says(scripted, "ab")
    scripted.script = [ids[0], 299, 280, ids[1]]
    tokens = list(scripted.stream([5], trivet.Sampling(max_new_tokens=4)))
    assert [token.text for token in tokens] == ["a", "", "", "b"]


@pytest.fixture
def end_tokens(text_checkpoint: Path) -> list[int]:
    return [7, 9]


@pytest.mark.parametrize("end", [7, 9])
def test_any_of_several_end_tokens_ends_and_is_no_text(
    end: int, text_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in text_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    with trivet.Runtime.load(tmp_path, device="cpu", limits=LIMITS, autostart=False) as runtime:
        script = [70, 71, end, 72, 73]

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(hidden.shape[0], 300)
            out[0, script[runtime._engine.scheduler.running[0].new_tokens]] = 50.0
            return out

        monkeypatch.setattr(runtime._engine.model, "logits", logits)
        decode = runtime.tokenizer.decode
        out = runtime.generate([[5]], trivet.Sampling(max_new_tokens=5))[0]
        assert (out.token_ids, out.finish_reason, out.text) == ((70, 71, end), "stop", decode([70, 71]))
        streamed = list(runtime.stream([5], trivet.Sampling(max_new_tokens=5)))
        assert "".join(token.text for token in streamed) == decode([70, 71])
        ignoring = runtime.generate([[5]], trivet.Sampling(max_new_tokens=5, ignore_eos=True))[0]
        assert (ignoring.token_ids, ignoring.finish_reason) == (tuple(script), "length")
        own = runtime.generate([[5]], trivet.Sampling(max_new_tokens=5, ignore_eos=True, stop_token_ids=[72]))[0]
        assert (own.token_ids, own.finish_reason) == ((70, 71, end, 72), "stop")
        stopped = trivet.Sampling(max_new_tokens=5, ignore_eos=True, stop=(decode([71]),))
        assert runtime.generate([[5]], stopped)[0].finish_reason == "stop"
