"""Sizes in bytes as people write them: ``80GiB``, ``141 GB``, ``1073741824``."""

from __future__ import annotations

import re
from fractions import Fraction

import click

_PREFIXES = "KMGT"
UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(_PREFIXES, start=1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate(_PREFIXES, start=1)},
}
"""Bytes of each unit, in upper case. A bare K, M, G or T is refused: people disagree on what it means."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes that `text` stands for, rounded down. ValueError says what is wrong with it."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"{text!r} is no size in bytes: expected a number with B, KB to TB or KiB to TiB, as in 80GiB")
    size_bytes = int(Fraction(match[1]) * UNITS[match[2].upper()])
    if size_bytes < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return size_bytes


def size_option(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Callback of an option whose value is a size: its bytes, or a usage error."""
    if value is None:
        return None
    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error
