"""Reading one JSON object from a file that a stranger wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path

from trivet.errors import CheckpointError, ConfigError

DEPTH_LIMIT = 64
"""Levels of nesting; published files have fewer than eight."""


def read_object(path: Path, error: type[ConfigError] | type[CheckpointError], limit_bytes: int) -> dict[str, object]:
    """Parse the JSON object in `path`.

    Raises:
        `error`: the path is not a regular file, is larger than `limit_bytes`, is not UTF-8 or not JSON, is
            nested too deeply to be parsed, or holds something other than an object. Names the path.
    """
    if not os.path.isfile(path):  # unlike Path.is_file, False also for a name that no file can have
        raise error(f"{path} is not a regular file: expected a JSON file")
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            if file_bytes > limit_bytes:
                raise error(
                    f"{path} has {file_bytes} bytes: expected a JSON file of at most {limit_bytes}; restore "
                    "the file from its source"
                )
            content = file.read(file_bytes)
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause}") from cause
    try:
        # ValueError: bytes that are not UTF-8, text that is not JSON, integers of thousands of digits.
        parsed = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} is not valid JSON: {cause}: restore the file from its source") from cause
    if not isinstance(parsed, dict):
        raise error(f"{path} holds a JSON {type(parsed).__name__}: expected an object")
    if _deeper_than(parsed, DEPTH_LIMIT):
        raise error(f"{path} is nested more than {DEPTH_LIMIT} levels deep: restore the file from its source")
    return parsed


def _deeper_than(value: object, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        layer = [
            child
            for parent in layer
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not layer:
            return False
    return any(isinstance(value, dict | list) for value in layer)
