"""What the values that a plugin gives have in common: how a wrong field is reported."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

from trivet.attention.protocol import DecodePath
from trivet.errors import PluginError


def wrong_field(value: str, field: str, found: object, expected: str) -> PluginError:
    """The error for `field` of `value`, a type with its name such as ``"ModelFamily 'qwen3'"``."""
    return PluginError(f"{value}: field {field!r} is {reprlib.repr(found)}, expected {expected}")


def as_tuple(found: object) -> object:
    """A list or another plain iterable as a tuple; strings and everything else as they are, to be refused."""
    return tuple(found) if isinstance(found, Iterable) and not isinstance(found, str | bytes) else found


def check_name(value: str, found: object) -> None:
    """Refuse a ``name`` that is not a non-empty string without surrounding blanks."""
    if not isinstance(found, str) or not found or found != found.strip():
        raise wrong_field(value, "name", found, "a non-empty string without blanks around it")


def check_paths(value: str, found: object) -> None:
    """Refuse ``decode_paths`` that are not distinct decode paths, at least one."""
    expected = "a sequence of at least one DecodePath, for example standard_paths()"
    if not isinstance(found, tuple) or not found:
        raise wrong_field(value, "decode_paths", found, expected)
    for path in found:
        if isinstance(path, type):
            remedy = f"{path.__name__} is a class: give an instance of it, {path.__name__}()"
            raise wrong_field(value, "decode_paths", found, f"{expected}; {remedy}")
        if not isinstance(path, DecodePath):
            missing = ", ".join(_missing_of(path)) or "part"
            raise wrong_field(value, "decode_paths", found, f"{expected}; {path!r} lacks {missing} of that protocol")
    names = [path.name for path in found]
    if len(set(names)) < len(names):
        raise wrong_field(value, "decode_paths", names, "paths of distinct names")


def _missing_of(path: object) -> list[str]:
    """Members of `DecodePath` that `path` has not, or has as None."""
    members = (name for name in vars(DecodePath) if not name.startswith("_"))
    return [name for name in members if getattr(path, name, None) is None]
