"""How a conformance check says that a promise is broken, or that it cannot be run. Free of torch."""

from __future__ import annotations

from typing import NoReturn


class Broken(AssertionError):
    """A promise does not hold.

    Args:
        observed: what was found, with numbers.
        expected: what should have been.
        cause: what most probably is wrong, and where to look.
    """

    def __init__(self, *, observed: str, expected: str, cause: str) -> None:
        for name, text in (("observed", observed), ("expected", expected), ("cause", cause)):
            if not text.strip():
                raise ValueError(f"a conformance check fails without saying what is {name}")
        self.observed, self.expected, self.cause = observed, expected, cause
        super().__init__(f"observed {observed}; expected {expected}; likely cause: {cause}")


class NotRun(Exception):
    """A check cannot be run here; the text says what is missing. Never counted as passed."""


def expect(holds: bool, *, observed: str, expected: str, cause: str) -> None:
    """Raise `Broken` unless `holds`."""
    if not holds:
        raise Broken(observed=observed, expected=expected, cause=cause)


def broken(*, observed: str, expected: str, cause: str) -> NoReturn:
    """Raise `Broken`."""
    raise Broken(observed=observed, expected=expected, cause=cause)
