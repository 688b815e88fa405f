"""Prompts of drawn tokens, and how their lengths are given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen


@frozen
class Lengths:
    """Lengths in tokens, drawn evenly from `least` to `most`, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """``"64"`` or ``"16-96"``. ValueError says what is wrong with it."""
        first, dash, last = text.partition("-")
        try:
            least, most = int(first), int(last if dash else first)
        except ValueError:
            expected = "expected one as in 64, or a range as in 16-96"
            raise ValueError(f"{text!r} is no length in tokens: {expected}") from None
        if not 1 <= least <= most:
            raise ValueError(f"{text!r} is no length in tokens: expected at least 1, and a range in ascending order")
        return cls(least, most)

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}-{self.most}"

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` lengths."""
        return [int(length) for length in rng.integers(self.least, self.most + 1, count)]


def drawn_prompts(rng: np.random.Generator, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Token ids of prompts of those lengths, each different from the others."""
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]
