"""Arithmetic on sizes that refuses what a kernel or an allocator would silently wrap.

Python's integers do not wrap; the int32 element counts that kernels take and the int64 byte counts that
allocators take do. Every size in Trivet passes through here before anything is allocated.
"""

from collections.abc import Iterable

from trivet.errors import CapacityExceeded

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def int32(dimension: str, value: int) -> int:
    """Return `value` if a kernel's int32 can hold it; else raise `CapacityExceeded` naming `dimension`."""
    return _within(dimension, value, INT32_MAX, "kernels take this count as int32: lower the limits")


def int64(dimension: str, value: int) -> int:
    """Return `value` if an int64 byte count or offset can hold it; else raise `CapacityExceeded`."""
    return _within(dimension, value, INT64_MAX, "byte counts are int64: lower the limits")


def sum_bytes(dimension: str, terms: Iterable[int]) -> int:
    """Sum byte counts; raise `CapacityExceeded` naming `dimension` past int64."""
    return int64(dimension, sum(terms))


def _within(dimension: str, value: int, bound: int, advice: str) -> int:
    if value < 0 or value > bound:
        raise CapacityExceeded(dimension, value, bound, advice)
    return value


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer not below ``numerator / denominator``, both positive."""
    return -(-numerator // denominator)
