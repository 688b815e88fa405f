"""The conformance kit: what a plugin author runs, and what the family is held to.

Three ways in, with the same checks under the same ids: ``trivet conform MODEL_TYPE``;
``pytest -p trivet.conformance --trivet-family MODEL_TYPE``; and a test class of one line::

    class TestMine(FamilyConformance):
        model_type = "mine"

The names below are fetched when they are first asked for, so that importing this imports neither torch nor pytest.
The names that begin with ``pytest_`` make this module a pytest plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trivet.conformance.check import Check, Tier
    from trivet.conformance.failure import Broken
    from trivet.conformance.kit import Asked, Kit
    from trivet.conformance.manifest import CHECKS
    from trivet.conformance.oracle import store_logprobs
    from trivet.conformance.outcome import Failure, Outcome
    from trivet.conformance.suite import FamilyConformance

__all__ = [
    # in a plugin's own tests
    "FamilyConformance",
    "store_logprobs",
    # running it oneself
    "Asked",
    "Broken",
    "CHECKS",
    "Check",
    "Failure",
    "Kit",
    "Outcome",
    "Tier",
]

_HOME = {
    "Asked": "kit",
    "Broken": "failure",
    "CHECKS": "manifest",
    "Check": "check",
    "FamilyConformance": "suite",
    "Failure": "outcome",
    "Kit": "kit",
    "Outcome": "outcome",
    "Tier": "check",
    "store_logprobs": "oracle",
}

_HOOKS = (
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_ignore_collect",
    "pytest_pycollect_makeitem",
    "pytest_sessionfinish",
    "pytest_unconfigure",
)


def __getattr__(name: str) -> object:
    if name in _HOOKS:
        home = "trivet.conformance.pytest_plugin"
    elif name in _HOME:
        home = f"trivet.conformance.{_HOME[name]}"
    else:
        raise AttributeError(f"module 'trivet.conformance' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOOKS})
