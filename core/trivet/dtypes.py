"""Element types by name, with their width. Free of torch, so that memory can be planned without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivet.errors import ConfigError

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by dtype name (the names that torch and config.json use)."""

FLOAT32_BYTES = ITEM_BYTES["float32"]
INT32_BYTES = ITEM_BYTES["int32"]

SERVED = ("float32", "bfloat16", "float16")
"""Dtypes that a model may be served in."""


def item_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`; `ConfigError` for an unknown name."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise ConfigError(f"unknown dtype {dtype!r}: expected one of {', '.join(ITEM_BYTES)}") from None


def served(dtype: object, where: str) -> str:
    """Return the plain name of a dtype that models are served in.

    Accepts ``"torch.bfloat16"`` as older config files spell it. `where` names the source in the error.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in SERVED:
        raise ConfigError(f"{where}: dtype {dtype!r} is not served: expected one of {', '.join(SERVED)}")
    return name


def as_torch(dtype: str) -> torch.dtype:
    """The torch dtype of that name."""
    import torch

    item_bytes(dtype)
    resolved = getattr(torch, dtype)
    assert isinstance(resolved, torch.dtype)
    return resolved
