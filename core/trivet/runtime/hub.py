"""Resolve a model id of the Hugging Face hub to a directory, from the local cache first. Needs the ``hub`` extra."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from trivet.errors import ConfigError
from trivet.installed import install_extra

MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""``organisation/name``, as the hub spells it."""

WANTED = ["*.json", "*.safetensors", "*.jinja"]
"""The files of a repository that a runtime reads."""


def fetch_from_hub(model_id: str) -> Path:
    """The directory of `model_id` in the hub's local cache; downloaded to it only if it is not there whole.

    Raises:
        ConfigError: the ``hub`` extra is not installed, or the model can neither be found locally nor downloaded.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{model_id!r} is no directory here, and looks like a model id of the Hugging Face hub: install the extra "
            f"that fetches those ({install_extra('hub')}), or give a directory"
        ) from error
    with suppress(Exception):  # whatever is wrong with the cache, a download may mend it
        cached = Path(snapshot_download(model_id, allow_patterns=WANTED, local_files_only=True))
        if (cached / "config.json").is_file() and any(cached.glob("*.safetensors")):
            return cached
    try:
        return Path(snapshot_download(model_id, allow_patterns=WANTED))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"model {model_id!r} is neither a directory nor in the hub's local cache, and could not be downloaded: "
            f"{reason}"
        ) from error
