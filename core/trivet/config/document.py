"""A parsed config.json as an immutable value whose getters check type and range.

The getters never coerce: a boolean is not an integer, ``"8"`` is not 8, and what an int32 cannot hold is
refused where it is read, before any size is computed from it. JSON ``null`` counts as absent.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NoReturn, TypeVar, overload

from attrs import field, frozen

from trivet.checked import INT32_MAX
from trivet.config.json_file import read_object
from trivet.errors import ConfigError

CONFIG_FILE = "config.json"
CONFIG_LIMIT_BYTES = 16 * 2**20
"""Published files are below 100 kB; past this the file is something else."""


class Required(Enum):
    """Marks a key that has no default."""

    REQUIRED = "required"


REQUIRED = Required.REQUIRED

Entry = TypeVar("Entry")


def _own_copy(values: Mapping[str, object]) -> dict[str, object]:
    return copy.deepcopy(dict(values))


@frozen
class ConfigDocument:
    """One JSON object of a checkpoint's config, with the place it stands at.

    Attributes:
        values: the object; the document keeps its own copy.
        where: what messages call it: ``"config.json"``, ``"config.json:text_config"``.
    """

    values: Mapping[str, object] = field(converter=_own_copy, repr=False)
    where: str = CONFIG_FILE

    @classmethod
    def read(cls, directory: Path | str) -> ConfigDocument:
        """Read ``config.json`` of a checkpoint directory.

        Raises:
            ConfigError: the directory or the file is missing, or the file is not a JSON object of sane size.
        """
        directory = Path(directory)
        if not os.path.exists(directory):
            raise ConfigError(
                f"checkpoint directory {directory} does not exist: expected a directory with {CONFIG_FILE}"
            )
        if not os.path.isdir(directory):
            raise ConfigError(f"{directory} is not a directory: expected a directory with {CONFIG_FILE}")
        path = directory / CONFIG_FILE
        if not os.path.lexists(path):
            raise ConfigError(
                f"no {CONFIG_FILE} in {directory}: expected a checkpoint directory with {CONFIG_FILE} "
                "and *.safetensors; point at the folder that holds both"
            )
        return cls(read_object(path, ConfigError, CONFIG_LIMIT_BYTES))

    @property
    def model_type(self) -> str:
        """The architecture's name, by which a plugin is found; `ConfigError` when absent."""
        return self.string("model_type")

    def has(self, key: str) -> bool:
        """Whether `key` is stated with anything but ``null``."""
        return self.values.get(key) is not None

    def raw(self, key: str) -> object:
        """The parsed JSON under `key` as it stands (a copy), or None when absent."""
        return copy.deepcopy(self.values.get(key))

    def sub(self, key: str) -> ConfigDocument:
        """The object nested under `key`; `ConfigError` when absent or not an object."""
        found = self._present(key, "an object")
        if not isinstance(found, Mapping):
            raise self.error(key, "an object")
        separator = "." if ":" in self.where else ":"
        return ConfigDocument(found, f"{self.where}{separator}{key}")

    @overload
    def integer(
        self, key: str, default: int | Required = REQUIRED, minimum: int = 1, maximum: int = INT32_MAX
    ) -> int: ...
    @overload
    def integer(self, key: str, default: None, minimum: int = 1, maximum: int = INT32_MAX) -> int | None: ...
    def integer(
        self, key: str, default: int | Required | None = REQUIRED, minimum: int = 1, maximum: int = INT32_MAX
    ) -> int | None:
        """An integer within ``[minimum, maximum]``; `default` when absent.

        Raises:
            ConfigError: absent without default, not an integer (4096.0 and true are not), or out of range.
        """
        expected = f"an integer from {minimum} to {maximum}"
        if not self.has(key) and not isinstance(default, Required):
            return default
        return self._integer(key, self._present(key, expected), expected, minimum, maximum)

    @overload
    def number(
        self,
        key: str,
        default: float | Required = REQUIRED,
        minimum: float = -math.inf,
        maximum: float = math.inf,
        above: float = -math.inf,
    ) -> float: ...
    @overload
    def number(
        self,
        key: str,
        default: None,
        minimum: float = -math.inf,
        maximum: float = math.inf,
        above: float = -math.inf,
    ) -> float | None: ...
    def number(
        self,
        key: str,
        default: float | Required | None = REQUIRED,
        minimum: float = -math.inf,
        maximum: float = math.inf,
        above: float = -math.inf,
    ) -> float | None:
        """A finite number within ``[minimum, maximum]`` and greater than `above`; `default` when absent.

        Raises:
            ConfigError: absent without default, not a number, NaN, infinite, or out of range.
        """
        bounds = (("at least", minimum), ("above", above), ("at most", maximum))
        limits = " and ".join(f"{word} {bound:g}" for word, bound in bounds if math.isfinite(bound))
        expected = f"a finite number {limits}".strip()
        if not self.has(key) and not isinstance(default, Required):
            return default
        found = self._present(key, expected)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.error(key, expected)
        try:
            number = float(found)
        except OverflowError:
            raise self.error(key, expected) from None
        if not (math.isfinite(number) and minimum <= number <= maximum and number > above):
            raise self.error(key, expected)
        return number

    @overload
    def boolean(self, key: str, default: bool | Required = REQUIRED) -> bool: ...
    @overload
    def boolean(self, key: str, default: None) -> bool | None: ...
    def boolean(self, key: str, default: bool | Required | None = REQUIRED) -> bool | None:
        """``true`` or ``false``; `default` when absent. `ConfigError` for anything else, 0 and 1 included."""
        if not self.has(key) and not isinstance(default, Required):
            return default
        found = self._present(key, "true or false")
        if not isinstance(found, bool):
            raise self.error(key, "true or false")
        return found

    @overload
    def string(self, key: str, default: str | Required = REQUIRED, allowed: Collection[str] = ()) -> str: ...
    @overload
    def string(self, key: str, default: None, allowed: Collection[str] = ()) -> str | None: ...
    def string(self, key: str, default: str | Required | None = REQUIRED, allowed: Collection[str] = ()) -> str | None:
        """A non-empty string, one of `allowed` where that is given; `default` when absent."""
        expected = f"one of {', '.join(map(repr, allowed))}" if allowed else "a non-empty string"
        if not self.has(key) and not isinstance(default, Required):
            return default
        found = self._present(key, expected)
        if not isinstance(found, str) or not found or (allowed and found not in allowed):
            raise self.error(key, expected)
        return found

    def strings(self, key: str, default: Sequence[str] | Required = REQUIRED) -> tuple[str, ...]:
        """A list of strings as a tuple; `default` when absent."""

        def entry(found: object) -> str:
            if not isinstance(found, str):
                raise self.error(key, "a list of strings")
            return found

        return self._list(key, default, "a list of strings", entry)

    def integers(
        self,
        key: str,
        default: Sequence[int] | Required = REQUIRED,
        minimum: int = 0,
        maximum: int = INT32_MAX,
    ) -> tuple[int, ...]:
        """A list of integers within ``[minimum, maximum]`` as a tuple; `default` when absent."""
        expected = f"a list of integers from {minimum} to {maximum}"
        return self._list(key, default, expected, lambda found: self._integer(key, found, expected, minimum, maximum))

    def error(self, key: str, expected: str, advice: str = "") -> ConfigError:
        """The error for the value under `key`: what was found, where, what was `expected`, what to do."""
        return ConfigError(
            f"{self.where}: {key!r} is {_shown(self.values.get(key))}: expected {expected}"
            + (f"; {advice}" if advice else "")
        )

    def refuse(self, key: str, reason: str, advice: str = "use a checkpoint without it") -> NoReturn:
        """Raise `ConfigError`: what `key` asks for is understood and not served, for `reason`."""
        raise ConfigError(
            f"{self.where}: {key!r} is {_shown(self.values.get(key))}, which is not served: {reason}; {advice}"
        )

    def _present(self, key: str, expected: str) -> object:
        found = self.values.get(key)
        if found is None:
            raise ConfigError(f"{self.where}: {key!r} is missing: expected {expected}")
        return found

    def _integer(self, key: str, found: object, expected: str, minimum: int, maximum: int) -> int:
        if isinstance(found, bool) or not isinstance(found, int) or not minimum <= found <= maximum:
            raise self.error(key, expected)
        return found

    def _list(
        self, key: str, default: Sequence[Entry] | Required, expected: str, entry: Callable[[object], Entry]
    ) -> tuple[Entry, ...]:
        if not self.has(key) and not isinstance(default, Required):
            return tuple(default)
        found = self._present(key, expected)
        if not isinstance(found, list):
            raise self.error(key, expected)
        return tuple(entry(item) for item in found)


def _shown(value: object, limit_characters: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit_characters else f"{text[:limit_characters]}..."


def text_first(document: ConfigDocument, key: str) -> ConfigDocument:
    """The document that decides `key`: its ``text_config`` where that states the key, else itself.

    Multimodal checkpoints nest the language model's config and repeat some keys at the root, where they may
    differ; the nested one speaks of the model that is served.
    """
    if document.has("text_config"):
        text = document.sub("text_config")
        if text.has(key):
            return text
    return document


def refuse_unserved_features(document: ConfigDocument) -> None:
    """Raise `ConfigError` for features that no family serves: quantised weights and sliding windows.

    Looks at the document and at a nested ``text_config``. What only one architecture knows (its activation,
    its layer kinds) is the family's to refuse.
    """
    if document.has("quantization_config"):
        document.refuse(
            "quantization_config",
            "weights are served as float32, bfloat16 or float16",
            "use the checkpoint in its original precision",
        )
    if document.boolean("use_sliding_window", default=False):
        document.refuse(
            "use_sliding_window",
            "every attention layer attends to the whole context",
            "set it to false if the model was trained with full attention",
        )
    if "sliding_attention" in document.strings("layer_types", default=()):
        document.refuse(
            "layer_types",
            "every attention layer attends to the whole context, 'sliding_attention' does not",
            "use a checkpoint whose layers are all of full or linear attention",
        )
    if document.has("text_config"):
        refuse_unserved_features(document.sub("text_config"))
