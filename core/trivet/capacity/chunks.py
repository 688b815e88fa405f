"""How rows of a recurrent layer are divided into chunks, by torch's operations and by the kernels of CUDA devices."""

from __future__ import annotations

import math

CHUNK_TOKENS = 32
"""Longest chunk of the delta rule, a power of two. Longer chunks cost more arithmetic per token, shorter ones more
operations per step; 32 is what a CPU does best with."""

SHORT_TOKENS = 8
"""Rows of up to this many tokens get chunks of their own length when longer rows are beside them."""

DEVICE_CHUNK_TOKENS = 64
"""Chunk of the delta rule in the kernels of CUDA devices."""

MOST_CUTS_PER_ROW = 2
"""Places inside a row of one step at which its recurrent state is kept for the prefix cache: a branch point, and the
last boundary. The scheduler asks for no more."""

LEAST_TILE = 16
"""Least dimension of a matrix instruction, in those kernels."""


def chunk_table_parts(rows: int, segments: int, chunks: int) -> tuple[int, ...]:
    """Elements of each part of a `trivet.ops.packed.ChunkTable`, in order.

    Each is a multiple of 16 bytes long, whatever the rows, since kernels are compiled for the alignment that they find.
    """
    return tuple(part + part % 2 for part in (segments + 1, 2 * chunks, 3 * segments, rows + 1))


def most_device_chunks(tokens: int, rows: int, grain_tokens: int) -> int:
    """Most chunks of `rows` rows, `tokens` together, that are cut at multiples of `grain_tokens` of their contexts.

    The last chunk of a segment may hold one token. Between two cuts of a row lie whole grains, though, so that the last
    chunk there lacks no more tokens than a multiple of the grain may be short of whole chunks.
    """
    lacking = DEVICE_CHUNK_TOKENS - math.gcd(grain_tokens, DEVICE_CHUNK_TOKENS)
    lacking = 2 * (DEVICE_CHUNK_TOKENS - 1) + (MOST_CUTS_PER_ROW - 1) * lacking
    return min(tokens, (tokens + rows * lacking) // DEVICE_CHUNK_TOKENS)
