"""Find a checkpoint: a directory, or the name of a model that ships with Trivet."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from trivet.errors import ConfigError

EMBEDDED = ("tiny-qwen3", "tiny-qwen35")
"""Names of the models that ship as package data."""


def locate_checkpoint(checkpoint: str | os.PathLike[str]) -> Path:
    """The directory of `checkpoint`; a name in `EMBEDDED` is a model that ships with the package.

    A directory of that name in the current folder does not shadow the shipped model; write ``./tiny-qwen3`` for it.
    """
    if isinstance(checkpoint, str) and checkpoint in EMBEDDED:
        path = Path(str(resources.files("trivet") / "models" / checkpoint))
        if not path.is_dir():
            raise ConfigError(f"model {checkpoint!r} ships with Trivet, but {path} is missing: reinstall the package")
        return path
    try:
        path = Path(checkpoint).expanduser()
    except (TypeError, RuntimeError) as error:
        expected = f"expected a directory or one of {', '.join(EMBEDDED)}"
        raise ConfigError(f"checkpoint is {checkpoint!r}, {expected}") from error
    if not path.is_dir():
        raise ConfigError(
            f"checkpoint {str(checkpoint)!r} is neither a directory nor one of the models that ship with Trivet "
            f"({', '.join(EMBEDDED)})"
        )
    return path
