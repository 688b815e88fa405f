"""What the CUDA graphs over a plan were captured with."""

from __future__ import annotations

from trivet.errors import TrivetError


class PlanMismatch(TrivetError):
    """An update planned a step otherwise than the captured graph that would replay it. Replaying would be wrong."""


class Captures:
    """By number of decode rows, the plan that a graph of that bucket was captured with.

    A graph freezes grid, split and workspace offsets; contents of buffers it reads anew. A plan made for decode rows
    depends on their number alone, so that an update never meets another key unless something is broken.
    """

    def __init__(self) -> None:
        self._keys: dict[int, tuple[int, ...]] = {}

    def note(self, rows: int, key: tuple[int, ...]) -> None:
        """Remember that a graph of `rows` decode rows was captured on a plan with `key`."""
        self._keys[rows] = key

    def check(self, rows: int, key: tuple[int, ...]) -> None:
        """Hold the plan of a pure decode step of `rows` rows against its capture, if there is one.

        Raises:
            PlanMismatch: they differ.
        """
        captured = self._keys.get(rows)
        if captured is not None and captured != key:
            raise PlanMismatch(
                f"a decode step of {rows} rows was planned as {list(key)}, its CUDA graph was captured with "
                f"{list(captured)}: the graph must not be replayed; capture it again on this plan"
            )

    def clear(self) -> None:
        """Forget all captures."""
        self._keys = {}
