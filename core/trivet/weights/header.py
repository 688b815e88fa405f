"""Why a safetensors file is refused: the tensor whose header entry does not hold.

The safetensors library validates a header but not always says which tensor is at fault. This reads the
header again, only after the library has refused it, and looks for the culprit.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

HEADER_LIMIT_BYTES = 100_000_000
"""The library's own limit."""
LENGTH_BYTES = 8
"""A file begins with the header's length, a little-endian unsigned 64-bit integer."""
DIMENSIONS_LIMIT = 64
"""As many as torch has; it also bounds the product taken below."""

DTYPE_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "C64": 64,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
"""Bits of one element, by the name that safetensors gives a dtype."""


def fault(path: Path) -> str | None:
    """What is wrong with the header of `path`, naming the tensor where there is one; None if nothing is."""
    file_bytes = path.stat().st_size
    if file_bytes < LENGTH_BYTES:
        return f"the file has {file_bytes} bytes: expected at least {LENGTH_BYTES}; download it again"
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if header_bytes > min(HEADER_LIMIT_BYTES, file_bytes - LENGTH_BYTES):
            return (
                f"the header claims {header_bytes} bytes, the file has {file_bytes}: it is truncated or not "
                "safetensors; download it again"
            )
        content = file.read(header_bytes)
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as cause:
        return f"the header is not valid JSON ({cause}): download the file again"
    if not isinstance(header, dict):
        return f"the header is a JSON {type(header).__name__}: expected an object"
    return _first_fault(header, file_bytes - LENGTH_BYTES - header_bytes)


def _first_fault(header: dict[str, object], data_bytes: int) -> str | None:
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        span = _span(entry)
        if isinstance(span, str):
            return f"tensor {name!r}: {span}"
        spans.append((*span, name))
    reached = 0
    for begin, end, name in sorted(spans):
        if end > data_bytes:
            return (
                f"tensor {name!r}: its data ends at byte {end}, the file holds {data_bytes} bytes of data: "
                "the file is truncated or its header lies; download it again"
            )
        if begin != reached:
            relation = "overlaps what precedes it" if begin < reached else "leaves a gap before it"
            return f"tensor {name!r}: its data begins at byte {begin} and {relation}: expected byte {reached}"
        reached = end
    if reached != data_bytes:
        return f"{data_bytes - reached} bytes follow the last tensor: expected none; download the file again"
    return None


def _span(entry: object) -> tuple[int, int] | str:
    """Where a tensor's data lies, or what is wrong with its entry."""
    if not isinstance(entry, dict):
        return f"its entry is {entry!r}: expected an object"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"dtype {dtype!r} is unknown: expected one of F32, BF16, F16"
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        return f"shape {shape!r}: expected a list of sizes"
    if len(shape) > DIMENSIONS_LIMIT:
        return f"its shape has {len(shape)} dimensions: expected at most {DIMENSIONS_LIMIT}"
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int and offset >= 0 for offset in offsets)
    ):
        return f"data_offsets {offsets!r}: expected two byte offsets"
    begin, end = offsets
    stated_bytes = -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)
    if end - begin != stated_bytes:
        return (
            f"shape {shape} of {dtype} takes {stated_bytes} bytes, its data_offsets {offsets} span "
            f"{end - begin}: the header lies; download the file again"
        )
    return begin, end
