"""The dtype that a checkpoint states."""

from trivet.config.document import ConfigDocument
from trivet.dtypes import served

KEYS = ("dtype", "torch_dtype")
"""Newer files say ``dtype``, older ones ``torch_dtype``."""


def read_dtype(document: ConfigDocument, default: str = "float32") -> str:
    """The stated dtype, from ``text_config`` first; `ConfigError` if it is not one that is served."""
    sources = [document.sub("text_config")] if document.has("text_config") else []
    for source in (*sources, document):
        for key in KEYS:
            if source.has(key):
                return served(source.string(key), f"{source.where}: {key}")
    return default
