"""A planned bound on the temporaries of one recurrent layer in the worst step.

The terms follow `trivet.ops.convolution`, `trivet.ops.gated_delta` and the gated norm behind them, stage by stage: what
a stage keeps alive at once beside what the layer holds throughout. Operations that copy an argument inside themselves
are allowed one such copy. The chunked kernels of a CUDA device, `trivet.ops.fused.delta_chunks`, are one more stage.
"""

from __future__ import annotations

import math

from trivet.dtypes import item_bytes
from trivet.geometry import RecurrentGeometry

CHUNK_TOKENS = 32
"""Longest chunk of the delta rule, a power of two. Longer chunks cost more arithmetic per token, shorter ones more
operations per step; 32 is what a CPU does best with."""

SHORT_TOKENS = 8
"""Rows of up to this many tokens get chunks of their own length when longer rows are beside them."""

DEVICE_CHUNK_TOKENS = 64
"""Chunk of the delta rule in the kernels of CUDA devices."""

MOST_CUTS_PER_ROW = 2
"""Places inside a row of one step at which its recurrent state is kept for the prefix cache: no more than the scheduler
asks for (`trivet.scheduler.bounds.SNAPSHOT_PAUSES`)."""

LEAST_TILE = 16
"""Least dimension of a matrix instruction."""

FLOAT32_BYTES = item_bytes("float32")
INDEX_BYTES = item_bytes("int64")


def chunk_table_parts(rows: int, segments: int, chunks: int) -> tuple[int, ...]:
    """Elements of each part of a `trivet.ops.packed.ChunkTable`, in order.

    Each is a multiple of 16 bytes long, whatever the rows, since kernels are compiled for the alignment that they find.
    """
    return tuple(part + part % 2 for part in (segments + 1, 2 * chunks, 4 * segments, rows + 1))


def recurrent_bytes(layer: RecurrentGeometry, tokens: int, rows: int, longest_row_tokens: int, width: int) -> int:
    """Bound on the temporaries of `layer`, in bytes.

    Args:
        tokens, rows: of the worst step.
        longest_row_tokens: most tokens that one row can have.
        width: bytes of one element of the served dtype.
    """
    projected = layer.conv_channels + layer.value_elements + 2 * layer.value_heads
    outputs = tokens * layer.value_elements * (2 * width + FLOAT32_BYTES)
    held = tokens * (projected + layer.conv_channels) * width + outputs
    # gathered from the slots, and again as results: of chunks, of single tokens, and of both put together
    states = 4 * rows * math.prod(layer.state_shape) * FLOAT32_BYTES + 2 * rows * math.prod(layer.tail_shape) * width
    gated_norm = tokens * layer.value_elements * (3 * width + 3 * FLOAT32_BYTES)
    stages = (
        _convolution_bytes(layer, tokens, rows, width),
        _single_token_bytes(layer, rows, width),
        _chunk_bytes(layer, tokens, min(rows, tokens // 2), min(longest_row_tokens, SHORT_TOKENS)),
        _chunk_bytes(layer, tokens, min(rows, tokens // (SHORT_TOKENS + 1)), longest_row_tokens),
        gated_norm,
        _device_chunk_bytes(layer, tokens, rows, width),
    )
    return held + states + max(stages)


def _convolution_bytes(layer: RecurrentGeometry, tokens: int, rows: int, width: int) -> int:
    tail = layer.conv_kernel - 1
    near = min(tokens, rows * tail)  # tokens that look back past their row's start
    window = rows * tail + 2 * near
    elements = tokens * 3 * FLOAT32_BYTES + window * (width + FLOAT32_BYTES)
    elements += near * (layer.conv_kernel + 1) * FLOAT32_BYTES
    indices = (window + near * (layer.conv_kernel + 2)) * INDEX_BYTES
    return layer.conv_channels * elements + indices


def _single_token_bytes(layer: RecurrentGeometry, rows: int, width: int) -> int:
    keys = 2 * layer.key_dim * (width + FLOAT32_BYTES)
    values = layer.value_dim * (width + 6 * FLOAT32_BYTES)
    return rows * layer.value_heads * (keys + values + 8 * FLOAT32_BYTES)


def _device_chunk_bytes(layer: RecurrentGeometry, tokens: int, rows: int, width: int) -> int:
    """Of the chunked kernels, which serve heads of whole matrix tiles in half precision; 0 for other layers.

    Rows are in segments between the places at which their state is kept, and a segment has a last chunk that may not
    be whole. The convolved inputs are among what `recurrent_bytes` counts throughout.
    """
    if width >= FLOAT32_BYTES or min(layer.key_dim, layer.value_dim) < LEAST_TILE:
        return 0
    segments = min((1 + MOST_CUTS_PER_ROW) * rows, tokens)
    heads, chunks = layer.value_heads, tokens // DEVICE_CHUNK_TOKENS + segments
    gates = tokens * heads * 2 * FLOAT32_BYTES
    systems = tokens * heads * DEVICE_CHUNK_TOKENS
    readers, written = tokens * heads * layer.key_dim, tokens * layer.value_elements
    states = chunks * math.prod(layer.state_shape)
    indices = sum(chunk_table_parts(rows, segments, chunks)) * INDEX_BYTES
    return gates + (systems + readers + written + states) * width + indices


def _chunk_bytes(layer: RecurrentGeometry, tokens: int, rows: int, longest_row_tokens: int) -> int:
    """Of `rows` rows of two tokens or more, padded to whole chunks."""
    if not rows:
        return 0
    chunk = min(CHUNK_TOKENS, 1 << (longest_row_tokens - 1).bit_length())
    places = tokens + rows * (chunk - 1)
    # queries and keys at unit length; what reads the state and what writes it, per value head
    keys = (2 * layer.key_heads + 3 * layer.value_heads) * layer.key_dim
    values = 4 * layer.value_heads * layer.value_dim
    products = (2 * layer.key_heads + 3 * layer.value_heads) * chunk
    gates = 8 * layer.value_heads
    indices = 2 * (places + tokens) * INDEX_BYTES
    return places * (keys + values + products + gates) * FLOAT32_BYTES + indices
