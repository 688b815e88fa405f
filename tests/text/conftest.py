"""Small tokenizers of the kinds that checkpoints bring, trained or built here."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from trivet.text import Tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and then it rests.",
    "Ein Trivet ist ein Dreifuß; drei Füße tragen einen heißen Topf.",
    "三脚架有三条腿。今天天气很好,我们去公园散步吧。",
    "五徳は鍋を支える三本脚の台です。こんにちは世界!",
    "Emoji: 😀 🙃 👩‍👩‍👧‍👦 🏳️‍🌈 and flags 🇩🇪🇯🇵, naïve café.",
]


def byte_level() -> tokenizers.Tokenizer:
    """Like Qwen's and GPT-2's: every token is a run of bytes."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|end|>"],
        show_progress=False,
    )
    inner.train_from_iterator(SENTENCES, trainer)
    # Neither is special, and one is not within the alphabet that stands for bytes.
    inner.add_tokens(["<think>", "é with spaces "])
    return inner


def byte_fallback() -> tokenizers.Tokenizer:
    """Like Llama 2's: words with a mark for the space before them, and single bytes for what has no token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁▁", "▁▁▁▁", "▁the", "▁world", "a", "b", "ing", "▁a", "é", "你", "�", "x▁y", ".", ","]
    tokens += list("cdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    inner = tokenizers.Tokenizer(
        models.BPE({token: place for place, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return inner


def metaspace() -> tokenizers.Tokenizer:
    """Like T5's: the same marks without bytes to fall back on."""
    inner = byte_fallback()
    inner.decoder = decoders.Metaspace()
    return inner


def wide_strip() -> tokenizers.Tokenizer:
    """One whose decoder takes off up to two spaces, so that a lone one gives no text."""
    inner = byte_fallback()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    inner.decoder = decoders.Sequence(steps)
    return inner


KINDS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "metaspace": metaspace,
    "wide strip": wide_strip,
}


@pytest.fixture(scope="session")
def all_tokenizers() -> dict[str, Tokenizer]:
    """One tokenizer of each kind."""
    return {kind: Tokenizer(build()) for kind, build in KINDS.items()}


@pytest.fixture(scope="session", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, all_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    """Each kind of tokenizer in turn."""
    return all_tokenizers[request.param]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint's directory that holds a tokenizer.json."""
    byte_fallback().save(str(tmp_path / "tokenizer.json"))
    return tmp_path
