"""A checkpoint's tokenizer, read from its tokenizer.json."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from trivet.errors import CheckpointError, RequestRejected

FILE_NAME = "tokenizer.json"

_FILE_LIMIT_BYTES = 2**30
_ID_LIMIT = 2**32
"""The library takes ids as 32-bit integers; greater ones are beyond any tokenizer."""


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads: nothing in it changes after loading.

    Args:
        inner: a tokenizer of the `tokenizers` library; its truncation and padding are turned off, because a prompt
            is neither cut nor filled up behind its sender's back.

    Attributes:
        vocab_size: number of tokens, added ones included.
        decoder: the decoder's description as it stands in tokenizer.json; empty if there is none.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        self.decoder: dict[str, Any] = json.loads(inner.decoder.__getstate__()) if inner.decoder is not None else {}
        added = inner.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)

    @cached_property
    def keeps_characters(self) -> bool:
        """Whether every character of a text is in some token: byte-level vocabularies, at most in composed form."""
        normalizer, pre_tokenizer = self._inner.normalizer, self._inner.pre_tokenizer
        composing = normalizer is None or json.loads(normalizer.__getstate__())["type"] in ("NFC", "NFKC")
        steps = "" if pre_tokenizer is None else pre_tokenizer.__getstate__().decode()
        strips = any(token.lstrip or token.rstrip for token in self._inner.get_added_tokens_decoder().values())
        byte_level = isinstance(self._inner.model, tokenizers.models.BPE) and '"ByteLevel"' in steps
        return composing and byte_level and '"Removed"' not in steps and not strips

    @cached_property
    def longest_token_chars(self) -> int:
        """Characters of the longest token, at most: in a byte-level vocabulary a token is written by its bytes."""
        return max(map(len, self._inner.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer | None:
        """The tokenizer of a checkpoint's directory; None if it has no tokenizer.json.

        Raises:
            CheckpointError: the file is there and cannot be read as a tokenizer.
        """
        path = Path(directory) / FILE_NAME
        if not os.path.lexists(path):
            return None
        if not os.path.isfile(path) or path.stat().st_size > _FILE_LIMIT_BYTES:
            raise CheckpointError(f"{path}: expected a regular file of at most {_FILE_LIMIT_BYTES} bytes")
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library is written in Rust, and its panics are not Exceptions
            raise CheckpointError(
                f"{path}: cannot be read as a tokenizer ({type(error).__name__}: {error}); "
                "expected the file that the tokenizers library saves"
            ) from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any text that is valid Unicode.
            add_special_tokens: add what the tokenizer's post-processor adds, such as a first token. A rendered chat
                template brings its own.

        Raises:
            RequestRejected: the text cannot be encoded.
        """
        if not isinstance(text, str):
            raise RequestRejected(f"text to encode: found {type(text).__name__}, expected str")
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # lone surrogates, or a character for which the vocabulary has no token
            raise RequestRejected(f"text cannot be encoded ({type(error).__name__}: {error})") from error
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of `token_ids`. Special tokens, and ids that the tokenizer lacks, decode to nothing."""
        known = [token_id for token_id in token_ids if 0 <= token_id < _ID_LIMIT]
        text: str = self._inner.decode(known, skip_special_tokens=True)
        return text

    def visible_token(self, token_id: int) -> str | None:
        """The vocabulary's entry for `token_id`, as the decoder gets it; None for what decodes to nothing."""
        if not 0 <= token_id < _ID_LIMIT:
            return None
        token: str | None = self._inner.id_to_token(token_id)
        return None if token is None or token in self._special else token
