"""Measure the floors of `trivet.conformance.tolerances` anew, and write its ledger.

python -m tests.conformance.measure_tolerances
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from unittest import mock

import attrs
import torch

from trivet.capacity import Limits
from trivet.conformance import tolerances as ledger
from trivet.conformance.bench import Bench
from trivet.conformance.checks import numerics
from trivet.plugin import PluginManager

MODEL_TYPES = ("qwen3", "qwen3_5", "qwen3_5_text")
COMMAND = "python -m tests.conformance.measure_tolerances"
MULTIPLES = {"logprob-max": 8.0, "logprob-mean": 3.0, "attention-max": 8.0}


def main() -> None:
    """Measure over every tiny model of the shipped families, and over ways of dividing their tokens."""
    scores: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    attention: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        for model_type in MODEL_TYPES:
            manager = PluginManager.discover()
            family = manager.family_for(model_type)
            record = next(record for record in manager.records if record.name == model_type)
            bench = Bench(model_type, family, record, Path(directory) / model_type)
            for tiny in bench.tinies:
                for dtype, step_tokens in (("float32", 96), ("float32", 5), ("float32", 1), ("bfloat16", 96)):
                    with bench.serve(tiny, dtype=dtype, limits=Limits(2, step_tokens, 96, 4)) as served:
                        for sequence in bench.oracle.sequences(tiny):
                            apart = (served.score(sequence.tokens) - sequence.logprobs[:-1]).abs()
                            scores[dtype].append(float(apart.max() if dtype == "float32" else apart.mean()))
            for seed in range(3):
                bench.seed = seed
                with mock.patch.object(numerics, "bound_of", lambda *_: 1.0):
                    attention.append(float(numerics.attention.run(bench)["attention_max"]))
    entries = [
        _entry("logprob-max", "float32", scores["float32"]),
        _entry("logprob-mean", "bfloat16", scores["bfloat16"]),
        _entry("attention-max", "float32", attention),
    ]
    file = Path(ledger.__file__).with_name(ledger.FILE)
    file.write_text(json.dumps([attrs.asdict(entry) for entry in entries], indent=1) + "\n")
    for entry in entries:
        print(entry.quantity, entry.dtype, f"floor {entry.floor:.3g}, bound {entry.bound:.3g}")


def _entry(quantity: str, dtype: str, samples: list[float]) -> ledger.Tolerance:
    rounded = tuple(float(f"{sample:.4g}") for sample in samples)
    version = torch.__version__.partition("+")[0]
    entry = ledger.Tolerance(quantity, "cpu", dtype, MULTIPLES[quantity], rounded, version, COMMAND)
    return attrs.evolve(entry, digest=entry.own_digest)


if __name__ == "__main__":
    main()
