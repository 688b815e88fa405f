"""The golden gate in bfloat16 on CUDA, over tiny geometries with heads that kernel libraries are made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trivet.cli import main

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
HYBRID = DENSE | {
    "model_type": "qwen3_5_text",
    "num_key_value_heads": 1,
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
GEOMETRIES = {f"dense-group-{group}": DENSE | {"num_attention_heads": 2 * group} for group in (4, 5, 6)} | {
    f"hybrid-group-{group}-expansion-{expansion}": HYBRID
    | {"num_attention_heads": group, "linear_num_value_heads": 2 * expansion}
    for group, expansion in ((6, 3), (4, 2), (6, 1))
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_gate_passes_and_every_fault_is_caught(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEOMETRIES[name]))
    code = main(["gate", str(tmp_path), "--weights", "random", "--device", "cuda", "--long", "--json"])
    written = capsys.readouterr()
    assert code == 0, written.err
    outcomes = {outcome["name"]: outcome for outcome in json.loads(written.out)["outcomes"]}
    assert outcomes["batched-17"]["notes"]["graph_steps"] > 0
