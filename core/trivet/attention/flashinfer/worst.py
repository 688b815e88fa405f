"""The steps of a capacity that need the most workspace, as lengths of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trivet.attention.flashinfer.bounds import rows_of_a_step
from trivet.capacity import PlanCapacity

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Lengths = tuple[NDArray[np.int32], NDArray[np.int32]]


def worst_decodes(capacity: PlanCapacity) -> list[Lengths]:
    """Query and KV lengths of pure decode steps: as few rows as can be, as many, and numbers between."""
    most = rows_of_a_step(capacity)
    numbers = sorted({1, most, *_halvings(most)})
    return [(np.ones(rows, np.int32), np.full(rows, capacity.positions, np.int32)) for rows in numbers]


def worst_chunks(capacity: PlanCapacity) -> list[Lengths]:
    """Query and KV lengths of prefill steps: all tokens in as few rows as can be, spread evenly, and between."""
    steps: list[Lengths] = []
    for rows in sorted({1, rows_of_a_step(capacity), *_halvings(rows_of_a_step(capacity))}):
        left, lengths = capacity.tokens - rows, np.ones(rows, np.int32)
        for row in range(rows):  # the first rows as long as may be, the others one token
            taken = min(left, capacity.positions - 1)
            lengths[row] += taken
            left -= taken
        even = np.minimum(capacity.positions, np.diff(np.arange(rows + 1) * capacity.tokens // rows)).astype(np.int32)
        for query_lengths in (lengths, even):
            steps.append((query_lengths, np.full(rows, capacity.positions, np.int32)))
    return steps


def _halvings(most: int) -> list[int]:
    return [most >> shift for shift in range(1, most.bit_length())]
