"""Find a checkpoint: a directory, the name of a model that ships with Trivet, or an id of the hub."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from trivet.errors import ConfigError
from trivet.runtime.hub import MODEL_ID, fetch_from_hub

EMBEDDED = ("tiny-qwen3", "tiny-qwen35")
"""Names of the models that ship as package data."""


def locate_checkpoint(checkpoint: str | os.PathLike[str]) -> Path:
    """The directory of `checkpoint`; a name in `EMBEDDED` is a model that ships with the package.

    ``organisation/name`` that is no directory here is an id of the Hugging Face hub (`fetch_from_hub`).

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
    if not path.is_dir() and isinstance(checkpoint, str) and MODEL_ID.fullmatch(checkpoint):
        return fetch_from_hub(checkpoint)
    if not path.is_dir():
        raise ConfigError(
            f"checkpoint {str(checkpoint)!r} is neither a directory nor one of the models that ship with Trivet "
            f"({', '.join(EMBEDDED)})"
        )
    return path
