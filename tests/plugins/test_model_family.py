"""A family is checked where it is made: the field, what was found and what was expected are all named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from trivet.errors import ConfigError, PluginError
from trivet.plugin import Capabilities, ModelFamily, standard_paths


def family(**changes: Any) -> ModelFamily:
    fields: dict[str, Any] = {
        "name": "toy",
        "model_types": ("toy",),
        "read_geometry": print,
        "weight_map": print,
        "build": "toy.model:build",
    }
    return ModelFamily(**{**fields, **changes})


class Tileless:
    """A decode path but for one member."""

    name = backend = "tileless"
    usable = layout = scratch_bytes = bind = print


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("name", "", "a non-empty string"),
        ("name", None, "a non-empty string"),
        ("model_types", "toy", "a tuple of at least one string"),
        ("model_types", (), "a tuple of at least one string"),
        ("model_types", ("toy", 3), "a tuple of at least one string"),
        ("model_types", 3, "a tuple of at least one string"),
        ("model_types", ("toy", "toy"), "each model_type once"),
        ("read_geometry", "module:function", "a callable of one argument"),
        ("weight_map", None, "a callable of one argument"),
        ("build", None, "a callable or a string 'module:attribute'"),
        ("build", "toy.model", "a callable or a string 'module:attribute'"),
        ("decode_paths", (), "at least one DecodePath"),
        ("decode_paths", standard_paths, "at least one DecodePath"),
        (
            "decode_paths",
            (object(),),
            "lacks name, backend, usable, tile, layout, scratch_bytes, bind of that protocol",
        ),
        ("decode_paths", (Tileless(),), "lacks tile of that protocol"),
        ("decode_paths", (type(standard_paths()[0]),), "is a class: give an instance of it"),
        ("decode_paths", (*standard_paths(), *standard_paths()), "paths of distinct names"),
        ("capabilities", {"prefix_cache": True}, "a Capabilities value"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(field: str, value: object, expected: str) -> None:
    with pytest.raises(PluginError) as caught:
        family(**{field: value})
    assert f"field {field!r} is " in str(caught.value) and expected in str(caught.value)


def test_lists_are_accepted_and_become_tuples() -> None:
    made = family(model_types=["toy", "toy_text"], decode_paths=list(standard_paths()))
    assert made.model_types == ("toy", "toy_text") and made.decode_paths == standard_paths()


def test_an_ordinary_family_has_the_standard_paths_and_every_capability() -> None:
    assert family().decode_paths == standard_paths()
    assert all(attrs.astuple(family().capabilities))


def test_equal_fields_make_equal_families() -> None:
    assert family() == family() and hash(family()) == hash(family())


def test_a_family_cannot_be_changed() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        family().name = "other"  # type: ignore[misc]


def test_a_builder_given_as_a_string_is_imported_only_when_it_is_asked_for(site: Path) -> None:
    (site / "late_model.py").write_text("class Models:\n    @staticmethod\n    def build(geometry, parameters): ...\n")
    made = family(build="late_model:Models.build")
    assert "late_model" not in sys.modules
    assert made.builder() is sys.modules["late_model"].Models.build


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise OSError('no kernels')", "importing faulty_model failed: OSError: no kernels"),
        ("built = 1", "faulty_model has no 'build'"),
        ("build = 1", "expected a callable that builds the decoder"),
    ],
)
def test_a_builder_that_cannot_be_had_names_family_and_target(site: Path, source: str, expected: str) -> None:
    (site / "faulty_model.py").write_text(source)
    with pytest.raises(PluginError) as caught:
        family(build="faulty_model:build").builder()
    assert "ModelFamily 'toy': field 'build' is 'faulty_model:build'" in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", Capabilities.names())
def test_a_capability_that_is_not_supported_refuses_with_its_meaning_and_a_way_out(name: str) -> None:
    family().require(name)
    with pytest.raises(ConfigError) as caught:
        family(capabilities=Capabilities(**{name: False})).require(name)
    message = str(caught.value)
    assert f"'toy' does not support {name}" in message
    assert Capabilities.meaning(name) in message and message.endswith(Capabilities.instead(name))


@pytest.mark.parametrize("name", Capabilities.names())
def test_the_page_on_plugins_gives_every_capability_its_meaning(name: str) -> None:
    page = " ".join((Path(__file__).parents[2] / "sdk_docs" / "plugins.md").read_text().split())
    assert f"`{name}`" in page and Capabilities.meaning(name) in page


def test_a_capability_is_true_or_false() -> None:
    with pytest.raises(PluginError, match="field 'mixed_steps' is 1, expected True or False"):
        Capabilities(mixed_steps=1)  # type: ignore[arg-type]
