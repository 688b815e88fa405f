"""Figures of samples, and tables of figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from attrs import frozen

DECIMALS = 4
"""Kept of every sample in a record, in milliseconds: a tenth of a microsecond."""


@frozen
class Figures:
    """What is reported of some samples, in their unit.

    Attributes:
        count: how many there are.
        least, mean: their minimum and their mean.
        p50, p95, p99: percentiles by the nearest rank: a sample that was really measured.
    """

    count: int
    least: float
    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Figures:
        """The figures of at least one sample."""
        ordered = sorted(samples)

        def rank(part: float) -> float:
            return ordered[max(0, math.ceil(part * len(ordered)) - 1)]

        return cls(len(ordered), ordered[0], statistics.fmean(ordered), rank(0.5), rank(0.95), rank(0.99))


def rounded(samples: Sequence[float]) -> list[float]:
    """The samples as a record keeps them."""
    return [round(sample, DECIMALS) for sample in samples]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown, whose columns also line up as plain text. Floats get three significant decimals."""
    lines = [[str(cell) for cell in header], *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    shown = [f"| {' | '.join(map(str.rjust, line, widths))} |" for line in lines]
    shown.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(shown)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
