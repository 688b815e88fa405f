"""A seed for a request that gave none."""

from __future__ import annotations

import hashlib


def derive_seed(runtime_seed: int, request_id: int | str) -> int:
    """The seed of a request without one: a value of the runtime's seed and the request's id alone.

    Returns:
        From 0 to 2**64 - 1; the same in every process and on every platform.
    """
    digest = hashlib.blake2b(f"{runtime_seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
