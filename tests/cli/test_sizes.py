"""Sizes are read exactly; what could mean two things is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.cli.sizes import UNITS, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1073741824", 2**30),
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        (" 141GB ", 141 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("512b", 512),
        ("0.1TB", 10**11),
    ],
)
def test_a_size_is_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "80G", "GiB", "-1GiB", "1e9", "80PiB", "nan", "inf", "1,5GiB", "0", "0.1B", "١GiB x"]
)
def test_what_is_no_size_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="byte") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@given(st.integers(1, 2**63), st.sampled_from(sorted(UNITS)))
def test_whole_numbers_are_never_rounded(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == count * UNITS[unit]
