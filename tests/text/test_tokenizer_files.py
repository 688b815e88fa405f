"""A checkpoint's tokenizer.json is read as it stands, or refused by name."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from tests.text.conftest import byte_fallback, byte_level

from trivet.errors import CheckpointError, RequestRejected
from trivet.text import Tokenizer


def test_a_directory_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    assert Tokenizer.load(tmp_path / "nowhere") is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"model": {"type": "Nonesuch"}}'])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_truncated_file_is_refused(saved: Path) -> None:
    path = saved / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(saved)


def test_a_directory_in_the_file_s_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match="regular file"):
        Tokenizer.load(tmp_path)


def test_special_tokens_are_added_as_the_post_processor_says_unless_asked_not_to(saved: Path) -> None:
    tokenizer = Tokenizer.load(saved)
    assert tokenizer is not None
    with_them, without = tokenizer.encode("the world"), tokenizer.encode("the world", add_special_tokens=False)
    assert with_them == [1, *without]
    assert tokenizer.decode(with_them) == "the world"


def test_truncation_and_padding_of_the_file_do_not_touch_a_prompt(saved: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=100)
    inner.save(str(saved / "tokenizer.json"))
    tokenizer = Tokenizer.load(saved)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("the world and more")) == "the world and more"
    assert len(tokenizer.encode("a")) < 10


def test_ids_beyond_the_tokenizer_decode_to_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the world")
    beyond = [tokenizer.vocab_size, 151_935, 2**31, 2**32, 2**63, -1]
    assert tokenizer.decode([*beyond, *ids, *beyond]) == tokenizer.decode(ids)
    assert tokenizer.decode(beyond) == ""


@pytest.mark.parametrize("text", ["\ud800", 5, None, b"bytes"])
def test_text_that_cannot_be_encoded_is_refused(tokenizer: Tokenizer, text: object) -> None:
    with pytest.raises(RequestRejected):
        tokenizer.encode(text)  # type: ignore[arg-type]


def test_threads_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [f"the world {'a' * (number % 40)} b{number}" for number in range(400)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected
        assert list(pool.map(tokenizer.decode, expected)) == [tokenizer.decode(ids) for ids in expected]


@pytest.mark.parametrize(
    ("change", "keeps"),
    [
        (lambda inner: setattr(inner, "normalizer", None), True),
        (lambda inner: setattr(inner, "normalizer", tokenizers.normalizers.NFC()), True),
        (lambda inner: setattr(inner, "normalizer", tokenizers.normalizers.StripAccents()), False),
        (lambda inner: setattr(inner, "pre_tokenizer", tokenizers.pre_tokenizers.Whitespace()), False),
        (lambda inner: inner.add_tokens([tokenizers.AddedToken("<cut>", rstrip=True)]), False),
    ],
)
def test_only_byte_level_vocabularies_are_said_to_keep_every_character(
    change: Callable[[tokenizers.Tokenizer], object], keeps: bool
) -> None:
    inner = byte_level()
    change(inner)
    assert Tokenizer(inner).keeps_characters == keeps
    assert not Tokenizer(byte_fallback()).keeps_characters
