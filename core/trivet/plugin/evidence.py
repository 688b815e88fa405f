"""What a family brings so that its conformance can be shown: tiny configs, an oracle, known failures. Free of torch."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping

from attrs import frozen

from trivet.errors import PluginError
from trivet.plugin.checks import wrong_field

_FILE = re.compile(r"\w+(\.\w+)*:[\w./-]+")


@frozen
class StoredOracle:
    """Log-probabilities that something else than the family has computed, kept beside it.

    Attributes:
        file: ``"package:file"``, a file that `trivet.conformance.store_logprobs` wrote and the package carries.

    Raises:
        PluginError: `file` is not of that form.
    """

    file: str

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.file, str) or not _FILE.fullmatch(self.file):
            raise wrong_field("StoredOracle", "file", self.file, "a string 'package:file'")


@frozen
class TransformersOracle:
    """A model class of Hugging Face's transformers, run over the same tiny checkpoints.

    Attributes:
        model: its name, as in ``"LlamaForCausalLM"``.

    Raises:
        PluginError: `model` is no name.
    """

    model: str

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.isidentifier():
            raise wrong_field("TransformersOracle", "model", self.model, "the name of a class of transformers")


Oracle = StoredOracle | TransformersOracle


@frozen
class ExpectedFailure:
    """A conformance check that the family is known to fail. Strict: it fails the run once the check passes.

    Attributes:
        check: id of the check, with its version, as in ``"plan.no-allocation/1"``.
        reason: why, in a sentence.
        link: where it is tracked, an http address.

    Raises:
        PluginError: one of them is missing.
    """

    check: str
    reason: str
    link: str

    def __attrs_post_init__(self) -> None:
        for name, expected, fits in (
            ("check", "an id with its version, as in 'plan.no-allocation/1'", r"\S+/\d+"),
            ("reason", "a sentence that says why", r".*\S.*"),
            ("link", "an http address where it is tracked", r"https?://\S+"),
        ):
            value = getattr(self, name)
            if not isinstance(value, str) or not re.fullmatch(fits, value, re.DOTALL):
                raise wrong_field("ExpectedFailure", name, value, expected)


def own_configs(found: object) -> object:
    """A private copy of ``tiny_configs``; what is no mapping stays as it is, to be refused."""
    return copy.deepcopy(dict(found)) if isinstance(found, Mapping) else found


def check_configs(value: str, found: object) -> None:
    """Refuse ``tiny_configs`` that are not configs by name."""
    expected = "config.json objects by name, as in {'plain': {'model_type': ...}}"
    if not isinstance(found, Mapping):
        raise wrong_field(value, "tiny_configs", found, expected)
    for name, config in found.items():
        if not isinstance(name, str) or not name.isprintable() or not name or "/" in name:
            raise wrong_field(value, "tiny_configs", name, f"{expected}; a name is printable and has no slash")
        if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
            raise wrong_field(value, f"tiny_configs[{name!r}]", config, "an object with a model_type")


def check_expected_failures(value: str, found: object) -> None:
    """Refuse ``expected_failures`` that are not distinct `ExpectedFailure` values."""
    if not isinstance(found, tuple) or not all(isinstance(entry, ExpectedFailure) for entry in found):
        raise wrong_field(value, "expected_failures", found, "a sequence of ExpectedFailure values")
    ids = [entry.check for entry in found]
    if len(set(ids)) < len(ids):
        raise PluginError(f"{value}: field 'expected_failures' lists {sorted(ids)}, expected each check once")
