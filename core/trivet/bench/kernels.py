"""Time on the device by kernel, as a record keeps it and as it is printed."""

from __future__ import annotations

import re
from typing import Any

from trivet.bench.figures import table
from trivet.bench.timeline import Breakdown

SHOWN = 24
NAME_CHARACTERS = 64
DECIMALS = 3
"""Kept of microseconds in a record: the profiler counts nanoseconds."""

OPERATION = re.compile(r"\w+(?:Functor|Ops|_kernel\w*)\b")
"""What a generic kernel of torch computes, among its template arguments."""


def breakdown_record(breakdown: Breakdown) -> dict[str, Any]:
    """What a record keeps of it, names in full."""
    kernels = [
        {"name": kernel.name, "count": kernel.count, "total_us": round(kernel.total_us, DECIMALS)}
        for kernel in breakdown.kernels
    ]
    return {
        "span_us": round(breakdown.span_us, DECIMALS),
        "idle_us": round(breakdown.idle_us, DECIMALS),
        "kernels": kernels,
    }


def kernel_table(breakdown: Breakdown, steps: int, unit: str = "step") -> str:
    """Kernels of one of `steps` units that lasted the span, with their share of it, and the idle time."""
    span_us = breakdown.span_us or 1.0
    shown = [(short_name(kernel.name), kernel.count, kernel.total_us) for kernel in breakdown.kernels[:SHOWN]]
    if rest := breakdown.kernels[SHOWN:]:
        count, total_us = sum(kernel.count for kernel in rest), sum(kernel.total_us for kernel in rest)
        shown.append((f"{len(rest)} others", count, total_us))
    rows = [
        (name, f"{count / steps:g}", total_us / steps, f"{total_us / span_us:.1%}") for name, count, total_us in shown
    ]
    return (
        f"{table(('kernel', f'per {unit}', f'us per {unit}', 'share'), rows)}\n"
        f"device idle {breakdown.idle_us / steps:.1f} us of a {unit} of {breakdown.span_us / steps:.1f} us"
    )


def short_name(name: str) -> str:
    """A kernel's name without types, namespaces and arguments; of a generic kernel of torch, with what it computes."""
    if "::" not in name and "<" not in name:
        return name[:NAME_CHARACTERS]
    plain = name.replace("(anonymous namespace)::", "")
    head, _, arguments = plain.partition("<")
    function = head.partition("(")[0].split()[-1].rpartition("::")[2]
    operations = OPERATION.findall(arguments)
    return (f"{function}<{operations[-1]}>" if operations else function)[:NAME_CHARACTERS]
