"""Numbers as options take them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click


class Number(click.FloatRange):
    """A finite number within a range: NaN compares false with every bound, and would pass for one within it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; `click.BadParameter` for what is none, is not finite or lies outside the range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def counts(
    least: int = 1, *, or_none: bool = False
) -> Callable[[click.Context, click.Parameter, str], tuple[int, ...]]:
    """Callback of an option whose value is whole numbers separated by commas: each once, in the order written.

    Args:
        least: of each number.
        or_none: whether an empty value is taken too, for no number.
    """

    def read(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
        if or_none and not value:
            return ()
        try:
            numbers = [int(part) for part in value.split(",")]
        except ValueError:
            numbers = []
        if not numbers or min(numbers) < least:
            expected = f"expected numbers of at least {least}, as in {least},16"
            raise click.BadParameter(f"{value!r}: {expected}", context, parameter)
        return tuple(dict.fromkeys(numbers))

    return read
