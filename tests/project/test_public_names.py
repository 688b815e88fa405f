"""The names that `trivet` and `trivet.plugin` export exist, and those of the public surface are among them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import trivet
import trivet.plugin

SURFACE = {
    "Limits",
    "Runtime",
    "Sampling",
    "Completion",
    "Token",
    "TokenLogprob",
    "Request",
    "StepReport",
    "MemoryLedger",
    "plan_memory",
    "TrivetError",
    "ConfigError",
    "CheckpointError",
    "CapacityExceeded",
    "MemoryBudgetError",
    "RequestRejected",
    "PluginError",
    "RuntimeDown",
}


@pytest.mark.parametrize("name", trivet.__all__)
def test_every_name_that_trivet_exports_exists(name: str) -> None:
    assert getattr(trivet, name) is not None
    assert name in dir(trivet)


def test_the_public_surface_is_exported() -> None:
    assert set(trivet.__all__) >= SURFACE


def test_type_checkers_are_told_the_same_homes_as_the_interpreter() -> None:
    assert trivet.__file__ is not None
    body = ast.parse(Path(trivet.__file__).read_text()).body
    (typed,) = (node for node in body if isinstance(node, ast.If))
    homes = {
        alias.name: node.module
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module != "trivet"
    }
    assert homes == trivet._HOME


def test_all_errors_derive_from_one() -> None:
    names = [name for name in trivet.__all__ if re.search(r"(Error|Exceeded|Rejected|Down)$", name)]
    assert len(names) == 8
    assert all(issubclass(getattr(trivet, name), trivet.TrivetError) for name in names)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'trivet' has no attribute 'Runtme'"):
        trivet.Runtme  # noqa: B018


@pytest.mark.parametrize("name", trivet.plugin.__all__)
def test_every_name_that_the_plugin_face_exports_exists(name: str) -> None:
    assert getattr(trivet.plugin, name) is not None
