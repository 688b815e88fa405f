"""One group-6 checkpoint with its oracle, for promises that do not turn on the geometry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from tests.support.checkpoints import make_qwen35


@frozen
class Group6:
    """A saved checkpoint, and the model that it was saved from."""

    directory: Path
    model: Any


@pytest.fixture(scope="session")
def group6(tmp_path_factory: pytest.TempPathFactory) -> Group6:
    """12 query heads over 2 KV heads, value heads twice the key heads, key dim 12 and value dim 8, four taps."""
    directory = tmp_path_factory.mktemp("group6")
    model = make_qwen35(
        directory,
        seed=6,
        num_attention_heads=12,
        num_key_value_heads=2,
        linear_key_head_dim=12,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    )
    return Group6(directory, model)
