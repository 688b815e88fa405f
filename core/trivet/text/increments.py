"""From tokens to text that no later token can change.

The pieces put together equal the tokenizer's decoding of all tokens. For the decoders of byte-level and of
byte-fallback vocabularies that holds for any tokens; for decoders not known here it holds as long as they look no
further back than a token, and ahead only to complete a character.
"""

from __future__ import annotations

import codecs
import re
from typing import Any, Protocol

from trivet.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_LONGEST_WAIT_TOKENS = 16
"""A character has at most four bytes, so that a longer tail of replacement characters is genuine."""

_BYTE_TOKEN = re.compile(r"<0x(?:[0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
"""A byte of a byte-fallback vocabulary, as the tokenizers library recognises it (it parses "+F" as well)."""


class Increments(Protocol):
    """Text of one request's tokens, piece by piece."""

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that has become certain."""

    def finish(self) -> str:
        """Return what was still uncertain, as the tokenizer decodes it when nothing follows."""


def increments(tokenizer: Tokenizer) -> Increments:
    """Increments for the tokenizer's kind of decoder."""
    steps = _steps(tokenizer.decoder)
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return ByteLevelIncrements(tokenizer)
    return WindowIncrements(tokenizer, byte_fallback=any(step.get("type") == "ByteFallback" for step in steps))


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The decoder's steps, nested sequences flattened."""
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


class ByteLevelIncrements:
    """For byte-level vocabularies (GPT-2, Qwen, Llama 3): tokens are bytes, and bytes become characters in order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Rust's lossy decoding and Python's replace alike: one replacement character for each maximal broken part.
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See `Increments`."""
        token = self._tokenizer.visible_token(token_id)
        return "" if token is None else self._characters.decode(_bytes_of(token))

    def finish(self) -> str:
        """See `Increments`."""
        return self._characters.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary.

    Printable ones of Latin-1 stand for themselves; the others, in order, are shifted past 255 (GPT-2's encoder).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(shifted)}


_BYTE_OF = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # an added token outside the alphabet stands for its own text
        return token.encode()


class WindowIncrements:
    """For every other decoder: decode the new tokens behind the ones before, and take what they added.

    The tokens before are kept because decoders treat the first token differently (they strip its space). With byte
    fallback, a run of bytes waits for its end: the library decodes it as a whole, and one wrong byte turns all of
    it into replacement characters.
    """

    def __init__(self, tokenizer: Tokenizer, byte_fallback: bool) -> None:
        self._tokenizer = tokenizer
        self._byte_fallback = byte_fallback
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """See `Increments`."""
        token = self._tokenizer.visible_token(token_id)
        if token is None:
            return ""
        self._pending.append(token_id)
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._tokenizer.decode(self._context + self._pending)
        waits = not self._byte_fallback and len(self._pending) < _LONGEST_WAIT_TOKENS
        if waits and text.endswith(REPLACEMENT):
            return ""
        piece = text[len(self._context_text) :]
        self._advance()
        return piece

    def finish(self) -> str:
        """See `Increments`."""
        if not self._pending:
            return ""
        text = self._tokenizer.decode(self._context + self._pending)
        self._pending = []
        return text[len(self._context_text) :]

    def _advance(self) -> None:
        """Make the tokens just decoded the context of the next."""
        context = self._pending
        text = self._tokenizer.decode(context)
        if not text:  # a lone space, stripped: only with tokens before it do the next ones keep theirs
            context = (self._context + context)[-_LONGEST_WAIT_TOKENS:]
            text = self._tokenizer.decode(context)
        self._context, self._context_text, self._pending = context, text, []
