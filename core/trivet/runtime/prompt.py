"""Check what callers pass as prompts, before anything is changed."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set

from trivet.errors import RequestRejected
from trivet.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]

ORDINARY_CHARS = 16
"""For each token that a prompt may have: text of fewer is encoded without a look at the vocabulary."""
ROOM_FOR_COMPOSITION = 4
"""Characters of a prompt, at most, for one that Unicode normalisation composes of them."""


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int, max_context: int) -> list[int]:
    """Token ids of `prompt`, text or ids.

    Raises:
        RequestRejected: text without a tokenizer or far beyond `max_context` tokens, an empty prompt, or ids outside
            the vocabulary.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestRejected(
                "the prompt is text, and the checkpoint has no tokenizer.json: pass token ids, or put that file beside "
                "config.json"
            )
        check_length(prompt, tokenizer, max_context)
        ids = tokenizer.encode(prompt)
    else:
        ids = _as_integers(prompt)
    return checked_ids(ids, vocab_size)


def check_length(text: str, tokenizer: Tokenizer, max_context: int) -> None:
    """Refuse text that cannot fit into `max_context` tokens before time is spent on encoding it.

    Raises:
        RequestRejected: it has more characters than so many of the longest tokens, with room for composed characters,
            and the tokenizer drops none.
    """
    if len(text) <= ORDINARY_CHARS * max_context or not tokenizer.keeps_characters:
        return
    if len(text) > ROOM_FOR_COMPOSITION * max_context * tokenizer.longest_token_chars:
        raise RequestRejected(
            f"the prompt has {len(text)} characters, more than {max_context} tokens (max_context) can hold: the "
            f"longest token has {tokenizer.longest_token_chars}"
        )


def checked_ids(ids: list[int], vocab_size: int) -> list[int]:
    """`ids` if there are any and all lie within the vocabulary; else `RequestRejected`."""
    if not ids:
        raise RequestRejected("the prompt is empty: expected at least one token")
    if min(ids) < 0 or max(ids) >= vocab_size:
        place, outside = next((i, token) for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise RequestRejected(
            f"prompt token {place} has id {outside}, outside the vocabulary: expected 0 to {vocab_size - 1}"
        )
    return ids


def _as_integers(prompt: Sequence[int]) -> list[int]:
    expected = "expected text or a sequence of token ids"
    if isinstance(prompt, bytes | bytearray | memoryview | Mapping | Set):
        raise RequestRejected(f"the prompt is {type(prompt).__name__}, {expected}")
    try:
        tokens = list(prompt)
    except TypeError as error:
        raise RequestRejected(f"the prompt is {type(prompt).__name__}, {expected}") from error
    if set(map(type, tokens)) <= {int}:  # nearly always, and a prompt may have a hundred thousand
        return tokens
    ids = []
    for place, token in enumerate(tokens):
        if isinstance(token, bool | str):
            raise RequestRejected(f"prompt token {place} is {token!r}, {expected}")
        try:
            ids.append(operator.index(token))
        except TypeError as error:
            raise RequestRejected(f"prompt token {place} is {token!r}, {expected}") from error
    return ids
