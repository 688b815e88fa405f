"""A planned bound on the temporaries of one recurrent layer in the worst step.

Where torch's operations compute, the terms follow `trivet.ops.convolution`, `trivet.ops.gated_delta` and the gated norm
behind them, stage by stage: what a stage keeps alive at once beside what the layer holds throughout. Operations that
copy an argument inside themselves are allowed one such copy.

Where the fused kernels serve, the terms are their tensors.
"""

from __future__ import annotations

import math

from trivet.capacity.chunks import (
    CHUNK_TOKENS,
    DEVICE_CHUNK_TOKENS,
    MOST_CUTS_PER_ROW,
    SHORT_TOKENS,
    chunk_table_parts,
    most_device_chunks,
)
from trivet.dtypes import FLOAT32_BYTES, item_bytes
from trivet.geometry import RecurrentGeometry

INDEX_BYTES = item_bytes("int64")


def recurrent_bytes(layer: RecurrentGeometry, tokens: int, rows: int, longest_row_tokens: int, width: int) -> int:
    """Bound on the temporaries of `layer` by torch's operations, in bytes.

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
    )
    return held + states + max(stages)


def fused_recurrent_bytes(
    layer: RecurrentGeometry, tokens: int, rows: int, chunked_rows: int, width: int, grain_tokens: int = 1
) -> int:
    """Bound on the temporaries of `layer` by the fused kernels, in bytes.

    Decode rows go first, through `trivet.ops.fused.delta_decode`; the others through `trivet.ops.fused.delta_chunks`.

    Args:
        tokens, rows: of the worst step.
        chunked_rows: most rows that are no decode rows.
        width: bytes of one element of the served dtype.
        grain_tokens: at whose multiples states are kept.
    """
    projected = layer.conv_channels + layer.value_elements + 2 * layer.value_heads
    held = tokens * (projected + layer.value_elements) * width
    prepared = rows * (layer.conv_channels + 2 * layer.value_heads) * FLOAT32_BYTES
    if not chunked_rows:
        return held + prepared
    segments = min((1 + MOST_CUTS_PER_ROW) * chunked_rows, tokens)
    chunks = most_device_chunks(tokens, chunked_rows, grain_tokens)
    table = sum(chunk_table_parts(chunked_rows, segments, chunks)) * INDEX_BYTES
    return held + table + max(prepared, _device_chunk_bytes(layer, tokens, width))


def _device_chunk_bytes(layer: RecurrentGeometry, tokens: int, width: int) -> int:
    """Of the chunked kernels: all that they make until they have what tokens read and write."""
    unit_length, values = 2 * tokens * layer.key_elements, tokens * layer.value_elements
    gates = 2 * tokens * layer.value_heads * FLOAT32_BYTES
    readers, written = tokens * layer.value_heads * layer.key_dim, tokens * layer.value_elements
    systems = 2 * tokens * layer.value_heads * DEVICE_CHUNK_TOKENS  # their inverses, and the weights of outputs
    return gates + (unit_length + values + readers + written + systems) * width


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
