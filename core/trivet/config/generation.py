"""What decides where generation ends and whether input and output embeddings are one."""

from __future__ import annotations

import os
from pathlib import Path

from trivet.config.document import CONFIG_LIMIT_BYTES, ConfigDocument, text_first
from trivet.config.json_file import read_object
from trivet.errors import ConfigError

GENERATION_CONFIG_FILE = "generation_config.json"


def read_end_token_ids(directory: Path | str, document: ConfigDocument) -> tuple[int, ...]:
    """Token ids that end a request, in the order stated and without repeats; empty where none is stated.

    ``eos_token_id`` (an integer or a list) of generation_config.json if that file gives one, else of
    `document`, the checkpoint's config: its ``text_config`` first, then its root.

    Raises:
        ConfigError: generation_config.json is damaged, or an ``eos_token_id`` is not made of token ids.
    """
    path = Path(directory) / GENERATION_CONFIG_FILE
    if os.path.lexists(path):
        values = read_object(path, ConfigError, CONFIG_LIMIT_BYTES)
        stated = _end_token_ids(ConfigDocument(values, GENERATION_CONFIG_FILE))
        if stated:
            return stated
    return _end_token_ids(text_first(document, "eos_token_id"))


def tied_embeddings(document: ConfigDocument, default: bool = False) -> bool:
    """Whether the output projection is the token embedding: ``tie_word_embeddings``.

    Read from ``text_config``, and from the root only where that is silent. `default` is the architecture's.
    """
    return text_first(document, "tie_word_embeddings").boolean("tie_word_embeddings", default=default)


def _end_token_ids(document: ConfigDocument) -> tuple[int, ...]:
    key = "eos_token_id"
    if not document.has(key):
        return ()
    if isinstance(document.raw(key), list):
        return tuple(dict.fromkeys(document.integers(key)))
    return (document.integer(key, minimum=0),)
