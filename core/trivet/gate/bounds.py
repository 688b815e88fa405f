"""What the gate allows: bounds as stated multiples of measured floors, kept with the samples.

The floor is what the rounding of a dtype alone does to a model: the reference in that dtype against the same reference
in the next wider one, over the sequences of a pass. ``bounds.json`` holds for each dtype and quantity the figure that
is always allowed, and the multiple of its own floor that a model is allowed where that is more. The floor is the
reference's alone: nothing that the runtime does can raise it. A digest covers figures, multiples and samples, so that
none is changed alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from attrs import frozen

FILE = "bounds.json"
QUANTITIES = ("regret", "mean", "p99")
LEAST_SHARED = 0.5
"""Part of the reference's most probable tokens that the runtime must report for the deltas to mean anything."""
DOCUMENTED = {"regret": 0.20, "mean": 0.06, "p99": 0.20}
"""In nats, for 16-bit dtypes: the golden-gate method's own figures, kept whatever was measured on small models."""
_DIGESTED = ("quantity", "dtype", "figure", "multiple", "samples", "torch", "transformers", "command")


@frozen
class Bounds:
    """In nats. The largest delta has no bound.

    Attributes:
        regret: of the chosen token under the reference, at any position.
        mean, p99: of the absolute differences of log-probabilities.
        shared: least part of the reference's alternatives that is compared.
    """

    regret: float
    mean: float
    p99: float
    shared: float = LEAST_SHARED


@frozen
class BoundEntry:
    """One entry of the file.

    Attributes:
        quantity: one of `QUANTITIES`.
        dtype: what is served.
        figure: what is always allowed.
        multiple: of a model's own floor, allowed where it is more than `figure`.
        samples: by model, the floor that was measured.
        torch, transformers: versions that they were measured with, on a CPU.
        command: how to measure them again.
        digest: over the rest.
    """

    quantity: str
    dtype: str
    figure: float
    multiple: float
    samples: dict[str, float]
    torch: str
    transformers: str
    command: str
    digest: str = ""

    @property
    def own_digest(self) -> str:
        """The digest that the entry should have."""
        values = [getattr(self, name) for name in _DIGESTED]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def bound(self, floor: float | None) -> float:
        """What a model with this floor is allowed; None and NaN stand for one that was not measured."""
        return self.figure if floor is None or not floor > 0 else max(self.figure, self.multiple * floor)


def entries() -> tuple[BoundEntry, ...]:
    """Every entry of the file."""
    listed: list[dict[str, Any]] = json.loads(resources.files("trivet.gate").joinpath(FILE).read_text("utf-8"))
    return tuple(BoundEntry(**entry) for entry in listed)


def bounds_of(dtype: str, floor: Mapping[str, float] | None = None) -> Bounds:
    """The bounds of a served dtype; float16 is held to those of bfloat16, whose rounding is coarser.

    Args:
        floor: by quantity, where it was measured on the model at hand.
    """
    key = "bfloat16" if dtype == "float16" else dtype
    floor = floor or {}
    return Bounds(**{e.quantity: e.bound(floor.get(e.quantity)) for e in entries() if e.dtype == key})
