"""Where a request ends, and whether the embeddings are tied, is read from the level that decides it."""

import json
from pathlib import Path
from typing import Any

import pytest

from trivet.config.document import ConfigDocument
from trivet.config.generation import read_end_token_ids, tied_embeddings
from trivet.errors import ConfigError


def _end_tokens(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> tuple[int, ...]:
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_end_token_ids(directory, ConfigDocument(config))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 1}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": 1}, {"eos_token_id": [7, 5, 7]}, (7, 5)),
        ({"eos_token_id": 1}, {"eos_token_id": None}, (1,)),
        ({"eos_token_id": 1}, {"eos_token_id": []}, (1,)),
        ({"eos_token_id": 0}, {"temperature": 0.6}, (0,)),
        ({"eos_token_id": [1, 2]}, None, (1, 2)),
        ({"eos_token_id": 1, "text_config": {"eos_token_id": 3}}, None, (3,)),
        ({"eos_token_id": 1, "text_config": {"eos_token_id": None}}, None, (1,)),
        ({"text_config": {"eos_token_id": 3}}, {"eos_token_id": 0}, (0,)),
        ({"text_config": {}}, None, ()),
    ],
)
def test_end_tokens_are_the_generation_configs_then_the_text_configs_then_the_roots(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert _end_tokens(tmp_path, config, generation) == expected


@pytest.mark.parametrize("value", [True, -1, 2**31, 1.0, "</s>", [1, "2"], [True], {"id": 1}])
def test_end_tokens_that_are_no_token_ids_are_an_error_naming_the_file(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=r"^generation_config\.json: 'eos_token_id' is "):
        _end_tokens(tmp_path, {"eos_token_id": 1}, {"eos_token_id": value})
    with pytest.raises(ConfigError, match=r"^config\.json:text_config: 'eos_token_id' is "):
        _end_tokens(tmp_path, {"text_config": {"eos_token_id": value}}, {})


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"])
def test_a_damaged_generation_config_is_an_error_even_where_the_config_would_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_end_token_ids(tmp_path, ConfigDocument({"eos_token_id": 1}))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, False),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": True, "text_config": {"hidden_size": 8}}, True),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": None}}, True),
    ],
)
def test_ties_are_read_from_the_text_config_and_from_the_root_only_where_it_is_silent(
    config: dict[str, Any], expected: bool
) -> None:
    assert tied_embeddings(ConfigDocument(config), default=not expected) is expected


@pytest.mark.parametrize("default", [True, False])
def test_ties_that_nothing_states_are_the_families(default: bool) -> None:
    assert tied_embeddings(ConfigDocument({"text_config": {}}), default) is default


def test_ties_that_are_no_boolean_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'tie_word_embeddings' is 1: expected true or false"):
        tied_embeddings(ConfigDocument({"tie_word_embeddings": 1}))
