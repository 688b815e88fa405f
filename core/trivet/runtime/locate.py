"""Find a checkpoint: a directory, the name of a model or geometry that ships with Trivet, or an id of the hub."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from trivet.errors import ConfigError
from trivet.runtime.hub import MODEL_ID, fetch_from_hub

EMBEDDED = ("tiny-qwen3", "tiny-qwen35")
"""Names of the models that ship as package data."""

GEOMETRIES = ("qwen3-0.6b", "qwen3-4b", "qwen3-14b", "qwen3.5-4b", "qwen3.5-27b")
"""Names of published geometries that ship as a config.json each: sizes without weights, and without end tokens."""


def locate_checkpoint(checkpoint: str | os.PathLike[str], *, with_weights: bool = False) -> Path:
    """The directory of `checkpoint`; a name in `EMBEDDED` or `GEOMETRIES` is one that ships with the package.

    ``organisation/name`` that is no directory here is an id of the Hugging Face hub (`fetch_from_hub`).

    A directory of that name in the current folder does not shadow what ships; write ``./tiny-qwen3`` for it.

    Args:
        with_weights: whether the weights are wanted too, which a geometry does not have.

    Raises:
        ConfigError: there is no such checkpoint, or it has no weights though they are wanted.
    """
    if isinstance(checkpoint, str) and checkpoint in EMBEDDED:
        return _shipped(checkpoint)
    if isinstance(checkpoint, str) and checkpoint in GEOMETRIES:
        if with_weights:
            raise ConfigError(
                f"{checkpoint!r} is a geometry, a config.json without weights: pass weights='random' (--weights "
                "random), or the directory of a checkpoint"
            )
        return _shipped(checkpoint, "geometries")
    if checkpoint == "":  # a path would take it for the current folder
        raise ConfigError(f"checkpoint is '', expected a directory (. for this one) or one of {', '.join(EMBEDDED)}")
    try:
        path = Path(checkpoint).expanduser()
        found = path.is_dir()
    except (TypeError, RuntimeError, OSError, ValueError) as error:
        expected = f"expected a directory or one of {', '.join(EMBEDDED)}"
        raise ConfigError(f"checkpoint is {checkpoint!r}, {expected}: {error}") from error
    if not found and isinstance(checkpoint, str) and MODEL_ID.fullmatch(checkpoint):
        return fetch_from_hub(checkpoint)
    if not found:
        raise ConfigError(
            f"checkpoint {str(checkpoint)!r} is neither a directory nor one of the models that ship with Trivet "
            f"({', '.join(EMBEDDED)}; with random weights also {', '.join(GEOMETRIES)})"
        )
    return path


def _shipped(name: str, *folders: str) -> Path:
    path = Path(str(resources.files("trivet"))).joinpath("models", *folders, name)
    if not path.is_dir():
        raise ConfigError(f"model {name!r} ships with Trivet, but {path} is missing: reinstall the package")
    return path
