"""How far results may differ from the oracle: bounds as stated multiples of measured floors, kept with their samples.

A bound is never written down. It is a multiple of the largest sample of its entry in ``tolerances.json``, and the
entry's digest covers samples and multiple together: loosening either without measuring again fails conformance.
"""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from typing import Any

from attrs import frozen

FILE = "tolerances.json"
MOST_MULTIPLE = 10.0
_DIGESTED = ("quantity", "model", "device", "dtype", "multiple", "samples", "torch", "command")


@frozen
class Tolerance:
    """One entry of the ledger.

    Attributes:
        quantity: what is compared, with its statistic, as in ``"logprob-max"``.
        model: the tiny config that it was measured on, as in ``"qwen3/grouped"``; ``"*"`` over all of them, for others.
        device: where it was measured.
        dtype: what was served.
        multiple: of the floor that is allowed.
        samples: what was measured, one for each model, sequence and mode.
        torch: version that it was measured with.
        command: how to measure it again.
        digest: over the rest.
    """

    quantity: str
    model: str
    device: str
    dtype: str
    multiple: float
    samples: tuple[float, ...]
    torch: str
    command: str
    digest: str = ""

    @property
    def floor(self) -> float:
        """The largest sample."""
        return max(self.samples)

    @property
    def bound(self) -> float:
        """What is allowed."""
        return self.multiple * self.floor

    @property
    def own_digest(self) -> str:
        """The digest that the entry should have."""
        values = [getattr(self, name) for name in _DIGESTED]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()

    def faults(self) -> list[str]:
        """What is wrong with the entry."""
        where = f"{self.quantity} of {self.model} on {self.device} in {self.dtype}"
        found = []
        if self.digest != self.own_digest:
            found.append(f"{where}: the digest is not that of samples and multiple: something was changed by hand")
        if not 1.0 <= self.multiple <= MOST_MULTIPLE:
            found.append(f"{where}: the multiple is {self.multiple:g}, expected from 1 to {MOST_MULTIPLE:g}")
        if len(self.samples) < 3 or min(self.samples) < 0:
            found.append(f"{where}: {len(self.samples)} samples, expected at least 3, none negative")
        return found


def tolerances() -> tuple[Tolerance, ...]:
    """Every entry of the ledger."""
    entries: list[dict[str, Any]] = json.loads(
        resources.files("trivet.conformance").joinpath(FILE).read_text(encoding="utf-8")
    )
    return tuple(Tolerance(**{**entry, "samples": tuple(entry["samples"])}) for entry in entries)


def bound_of(quantity: str, device: str, dtype: str, model: str = "*") -> float:
    """The bound for a quantity, of `model` where it was measured, else over all that were.

    Raises:
        LookupError: nothing was measured on that device in that dtype.
    """
    found = [e for e in tolerances() if (e.quantity, e.device, e.dtype) == (quantity, device, dtype)]
    for wanted in (model, "*"):
        for entry in found:
            if entry.model == wanted:
                return entry.bound
    raise LookupError(f"no tolerance was measured for {quantity} on {device} in {dtype}")
