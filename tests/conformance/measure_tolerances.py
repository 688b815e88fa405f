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
MULTIPLES = {"logprob-max": 8.0, "logprob-mean": 2.0, "attention-max": 8.0}


def main() -> None:
    """Measure over every tiny model of the shipped families, and over ways of dividing their tokens."""
    samples: dict[tuple[str, str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for model_type in MODEL_TYPES:
            manager = PluginManager.discover()
            family = manager.family_for(model_type)
            record = next(record for record in manager.records if record.name == model_type)
            bench = Bench(model_type, family, record, Path(directory) / model_type)
            for tiny in bench.tinies:
                for dtype, step_tokens in (("float32", 96), ("float32", 5), ("float32", 1), ("bfloat16", 96)):
                    quantity = "logprob-max" if dtype == "float32" else "logprob-mean"
                    for page_size in (4, 16):
                        with bench.serve(tiny, dtype=dtype, limits=Limits(2, step_tokens, 96, page_size)) as served:
                            for sequence in bench.oracle.sequences(tiny):
                                apart = (served.score(sequence.tokens) - sequence.logprobs[:-1]).abs()
                                sample = float(apart.max() if dtype == "float32" else apart.mean())
                                for model in (f"{family.name}/{tiny.name}", "*"):
                                    samples.setdefault((quantity, model, dtype), []).append(sample)
            for seed in range(3):
                bench.seed = seed
                with mock.patch.object(numerics, "bound_of", lambda *_: 1.0):
                    measured = numerics.attention.run(bench)
                assert measured is not None
                samples.setdefault(("attention-max", "*", "float32"), []).append(measured["attention_max"])
    entries = [_entry(*key, found) for key, found in sorted(samples.items())]
    file = Path(ledger.__file__).with_name(ledger.FILE)
    file.write_text(json.dumps([attrs.asdict(entry) for entry in entries], indent=1) + "\n")
    for entry in entries:
        print(f"{entry.quantity} {entry.model} {entry.dtype}: floor {entry.floor:.3g}, bound {entry.bound:.3g}")


def _entry(quantity: str, model: str, dtype: str, samples: list[float]) -> ledger.Tolerance:
    rounded = tuple(float(f"{sample:.4g}") for sample in samples)
    version = torch.__version__.partition("+")[0]
    entry = ledger.Tolerance(quantity, model, "cpu", dtype, MULTIPLES[quantity], rounded, version, COMMAND)
    return attrs.evolve(entry, digest=entry.own_digest)


if __name__ == "__main__":
    main()
