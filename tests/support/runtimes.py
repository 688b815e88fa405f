"""Runtimes over tiny checkpoints of both families, and what must hold of one at rest."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tests.support.checkpoints import make_qwen3, make_qwen35

import trivet

FAMILIES = ("qwen3", "qwen3.5")


def make_checkpoint(family: str, directory: Path, *, tokenizer: bool = False, **overrides: object) -> Path:
    """A tiny random checkpoint of `family`, with a byte-level tokenizer of 256 bytes if asked for."""
    settings: dict[str, object] = {"num_hidden_layers": 2} | overrides
    if tokenizer:
        settings["vocab_size"] = 300
    if family == "qwen3":
        make_qwen3(directory, **settings)
    else:
        make_qwen35(directory, layer_types=["linear_attention", "full_attention"], **settings)
    if tokenizer:
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        model = tokenizers.models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[])
        inner = tokenizers.Tokenizer(model)
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        inner.save(str(directory / "tokenizer.json"))
    return directory


def assert_at_rest(runtime: trivet.Runtime) -> None:
    """Nobody holds anything: all pages free or cached, all slots free, nothing reserved."""
    stats = runtime.stats()
    assert stats["requests_running"] == stats["requests_waiting"] == 0
    assert stats["pages_held"] == 0, stats
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    assert stats["pages_reserved"] == 0
    assert stats["slots_free"] == stats["slots_total"]
