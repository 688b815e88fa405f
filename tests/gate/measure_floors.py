"""Measure the floors of `trivet.gate.bounds` anew, and write its file.

python -m tests.gate.measure_floors
"""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import torch
import transformers

import trivet
from trivet.gate import bounds
from trivet.gate.passes import Bench, sequential
from trivet.gate.reference import Reference
from trivet.gate.run import measure_floor, sizes_for
from trivet.gate.settings import GateSettings

COMMAND = "python -m tests.gate.measure_floors"
MODELS = ("tiny-qwen3", "tiny-qwen35")
MULTIPLES = {
    "bfloat16": {"regret": 2.0, "mean": 2.0, "p99": 2.0},
    "float32": {"regret": 20.0, "mean": 20.0, "p99": 20.0},
}
LEAST = 1e-4
"""In nats: float32 floors lie so low that another order of summation is several times more."""


def main() -> None:
    """Measure over the shipped models, in each dtype."""
    found = []
    for dtype, multiples in MULTIPLES.items():
        floors = {model: _floor(model, dtype) for model in MODELS}
        for quantity, multiple in multiples.items():
            samples = {model: float(f"{floor[quantity]:.4g}") for model, floor in floors.items()}
            figure = max(LEAST, multiple * max(samples.values()))
            if dtype == "bfloat16":
                figure = bounds.DOCUMENTED[quantity]
            versions = torch.__version__.partition("+")[0], transformers.__version__
            entry = bounds.BoundEntry(quantity, dtype, float(f"{figure:.4g}"), multiple, samples, *versions, COMMAND)
            found.append(attrs.evolve(entry, digest=entry.own_digest))
            print(f"{dtype} {quantity}: floors {samples}, figure {entry.figure:g}")
    file = Path(bounds.__file__).with_name(bounds.FILE)
    file.write_text(json.dumps([attrs.asdict(entry) for entry in found], indent=1) + "\n")


def _floor(model: str, dtype: str) -> dict[str, float]:
    load = {"device": "cpu", "dtype": dtype}
    settings = GateSettings(model, load, "tensors", (9,), 12, False, (), False, True, 0)
    sizes = sizes_for(settings)
    with trivet.Runtime.load(model, autostart=False, limits=sizes.limits, kv_pages=sizes.kv_pages, **load) as runtime:
        served = sequential(Bench(runtime, settings, sizes)).served
        return measure_floor(Reference.over_tensors(runtime), served).as_floor()


if __name__ == "__main__":
    main()
