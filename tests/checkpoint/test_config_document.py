"""config.json is read strictly: what a size is computed from has been checked where it was read."""

import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.config.document import CONFIG_LIMIT_BYTES, ConfigDocument, refuse_unserved_features
from trivet.errors import ConfigError

NOT_INTEGERS = [True, False, 8.0, "8", [8], {"value": 8}, 0, -1, 2**31, 2**40, 10**4000]
NOT_NUMBERS = [True, "1e-6", [1.0], float("nan"), float("inf"), -float("inf"), 10**400]


def test_a_checkpoint_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 64}')
    document = ConfigDocument.read(tmp_path)
    assert document.model_type == "qwen3"
    assert document.integer("hidden_size") == 64


@pytest.mark.parametrize("name", ["absent", "a" * 5000, "a\0b"], ids=["absent", "too-long", "null-byte"])
def test_a_missing_directory_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} does not exist"):
        ConfigDocument.read(tmp_path / name)


def test_a_file_in_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("")
    with pytest.raises(ConfigError, match=r"weights is not a directory"):
        ConfigDocument.read(tmp_path / "weights")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json in .*expected a checkpoint directory"):
        ConfigDocument.read(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"hidden_size": 64', "not valid JSON"),
        (b'{"hidden_size": \xff}', "not valid JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'["qwen3"]', "holds a JSON list: expected an object"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "not valid JSON|levels deep"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "levels deep"),
        (b" " * (CONFIG_LIMIT_BYTES + 1), "expected a JSON file of at most"),
    ],
    ids=["empty", "cut", "not-utf8", "endless-integer", "list", "very-deep", "deep", "huge"],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"config\.json.*({message})"):
        ConfigDocument.read(tmp_path)


def test_a_directory_called_config_json_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"not a regular file"):
        ConfigDocument.read(tmp_path)


def test_a_missing_model_type_is_named() -> None:
    with pytest.raises(ConfigError, match=r"config\.json: 'model_type' is missing"):
        _ = ConfigDocument({}).model_type


@given(st.integers(1, 2**31 - 1))
def test_an_integer_in_range_is_returned_as_it_stands(value: int) -> None:
    assert ConfigDocument({"size": value}).integer("size") == value


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=lambda value: repr(value)[:12])
def test_what_is_no_int32_size_is_an_error_with_key_found_and_expected(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ConfigDocument({"hidden_size": value}).integer("hidden_size")
    message = str(caught.value)
    assert message.startswith("config.json: 'hidden_size' is ")
    assert repr(value)[:100] in message
    assert "expected an integer from 1 to 2147483647" in message
    assert len(message) < 300


def test_a_config_that_asks_for_2_to_the_40_fails_at_once_and_allocates_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 2**40}))
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(ConfigError, match=r"'vocab_size' is 1099511627776"):
            ConfigDocument.read(tmp_path).integer("vocab_size")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 1.0
    assert peak_bytes < 2**20


@given(st.floats(1e-300, 1e300) | st.integers(1, 2**53))
def test_a_finite_number_is_returned_as_a_float(value: float) -> None:
    found = ConfigDocument({"eps": value}).number("eps", above=0.0)
    assert isinstance(found, float)
    assert found == value


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: repr(value)[:12])
def test_what_is_no_finite_number_is_an_error(value: object) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: 'eps' is .*: expected a finite number"):
        ConfigDocument({"eps": value}).number("eps")


@pytest.mark.parametrize(("value", "bound"), [(0.0, "above 0"), (-1, "above 0"), (1.5, "at most 1")])
def test_a_number_outside_its_bounds_names_them(value: float, bound: str) -> None:
    with pytest.raises(ConfigError, match=bound):
        ConfigDocument({"factor": value}).number("factor", above=0.0, maximum=1.0)


def test_json_infinity_is_refused_where_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"unread": NaN, "eps": 1e999}')
    document = ConfigDocument.read(tmp_path)
    with pytest.raises(ConfigError, match=r"'eps' is inf"):
        document.number("eps")


@pytest.mark.parametrize("value", [0, 1, "true", [], 1.0])
def test_only_true_and_false_are_booleans(value: object) -> None:
    with pytest.raises(ConfigError, match=r"'tied' is .*: expected true or false"):
        ConfigDocument({"tied": value}).boolean("tied")


@pytest.mark.parametrize("value", [3, "", ["silu"], True])
def test_only_non_empty_text_is_a_string(value: object) -> None:
    with pytest.raises(ConfigError, match=r"'hidden_act' is .*: expected a non-empty string"):
        ConfigDocument({"hidden_act": value}).string("hidden_act")


def test_a_string_outside_the_allowed_ones_names_them() -> None:
    with pytest.raises(ConfigError, match=r"'hidden_act' is 'gelu': expected one of 'silu'"):
        ConfigDocument({"hidden_act": "gelu"}).string("hidden_act", allowed=("silu",))


def test_lists_are_read_as_tuples() -> None:
    document = ConfigDocument({"layer_types": ["a", "b"], "sections": [11, 11, 10]})
    assert document.strings("layer_types") == ("a", "b")
    assert document.integers("sections") == (11, 11, 10)


@pytest.mark.parametrize("value", ["ab", 3, {"0": "a"}, ["a", 3], [None]])
def test_a_list_of_strings_holds_nothing_else(value: object) -> None:
    with pytest.raises(ConfigError, match=r"'layer_types' is .*: expected a list of strings"):
        ConfigDocument({"layer_types": value}).strings("layer_types")


@pytest.mark.parametrize("value", [3, "3", [1.0], [True], [-1], [2**31]])
def test_a_list_of_integers_holds_nothing_else(value: object) -> None:
    with pytest.raises(ConfigError, match=r"'sections' is .*: expected a list of integers from 0"):
        ConfigDocument({"sections": value}).integers("sections")


def test_null_counts_as_absent() -> None:
    document = ConfigDocument({"key": None})
    assert not document.has("key")
    assert document.integer("key", default=3) == 3
    assert document.number("key", default=None) is None
    assert document.boolean("key", default=True) is True
    assert document.string("key", default=None) is None
    assert document.strings("key", default=()) == ()
    assert document.raw("key") is None
    with pytest.raises(ConfigError, match=r"'key' is missing: expected an integer"):
        document.integer("key")


def test_a_nested_document_is_named_by_its_path() -> None:
    document = ConfigDocument({"text_config": {"rope_parameters": {"rope_theta": "x"}}})
    with pytest.raises(ConfigError, match=r"^config\.json:text_config\.rope_parameters: 'rope_theta' is 'x'"):
        document.sub("text_config").sub("rope_parameters").number("rope_theta")


@pytest.mark.parametrize("value", [[], "text", 3, True])
def test_a_nested_document_that_is_no_object_is_an_error(value: object) -> None:
    with pytest.raises(ConfigError, match=r"'text_config' is .*: expected an object"):
        ConfigDocument({"text_config": value}).sub("text_config")


def test_a_document_does_not_change_with_what_it_was_made_from_or_gave_out() -> None:
    source: dict[str, object] = {"sizes": [1, 2], "text_config": {"size": 1}}
    document = ConfigDocument(source)
    source["sizes"].append(3)  # type: ignore[attr-defined]
    document.raw("sizes").append(4)  # type: ignore[attr-defined]
    assert document.integers("sizes") == (1, 2)


UNSERVED = [
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
]


@pytest.mark.parametrize(("values", "key"), UNSERVED)
@pytest.mark.parametrize("nested", [False, True])
def test_a_feature_that_is_not_served_is_refused_with_its_place(
    values: dict[str, object], key: str, nested: bool
) -> None:
    document = ConfigDocument({"text_config": values} if nested else values)
    place = r"config\.json:text_config" if nested else r"config\.json"
    with pytest.raises(ConfigError, match=rf"^{place}: '{key}' is .*, which is not served: .*; use|set"):
        refuse_unserved_features(document)


def test_a_config_that_mentions_such_a_feature_unused_is_served() -> None:
    refuse_unserved_features(
        ConfigDocument(
            {
                "quantization_config": None,
                "use_sliding_window": False,
                "sliding_window": 4096,
                "layer_types": ["full_attention", "linear_attention"],
                "text_config": {"use_sliding_window": False},
            }
        )
    )


def test_a_family_refuses_what_only_it_knows() -> None:
    with pytest.raises(ConfigError, match=r"'hidden_act' is 'gelu', which is not served: only silu"):
        ConfigDocument({"hidden_act": "gelu"}).refuse("hidden_act", "only silu is compiled")


def test_planning_imports_no_torch() -> None:
    program = (
        "import sys, trivet.config.generation, trivet.config.rope, trivet.weights.map\nsys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == 0
