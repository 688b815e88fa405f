"""What a page holds, as a digest: of its own tokens and, through its parent's digest, of all tokens before them."""

from __future__ import annotations

from array import array
from hashlib import blake2b

DIGEST_BYTES = 16
ROOT_DIGEST = bytes(DIGEST_BYTES)
"""Stands for the empty prefix."""


def extend_digests(digests: list[bytes], tokens: array[int], page_size: int, full_pages: int) -> None:
    """Append digests until `digests` has one for each of the first `full_pages` pages of `tokens`.

    A digest is blake2b over the parent page's digest and the page's token ids as int32. It is computed once per
    request and page: matching and publishing read the same list.

    Args:
        digests: digests of the leading pages, as far as they are known; extended in place.
        tokens: int32 token ids of the request, at least ``full_pages * page_size`` of them.
    """
    known = len(digests)
    if known >= full_pages:
        return
    digest = digests[-1] if known else ROOT_DIGEST
    page_bytes = page_size * tokens.itemsize
    content = tokens[known * page_size : full_pages * page_size].tobytes()
    for start in range(0, len(content), page_bytes):
        digest = blake2b(digest + content[start : start + page_bytes], digest_size=DIGEST_BYTES).digest()
        digests.append(digest)
