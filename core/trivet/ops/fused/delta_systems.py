# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The chunked delta rule before any state is known: what the tokens of each chunk are to each other.

Each token corrects what those before it wrote. Within a chunk that is a system of equations ``(I + L) x = b``, with
``L`` the decayed products of keys, strictly below the diagonal. Solved for values it gives what tokens write if the
state before the chunk is zero; solved for keys, what they read of that state (https://arxiv.org/abs/2412.06464).

Two kernels: one solves, and holds little in registers, so that many of its programs hide each other's latency; the
other multiplies what was solved with keys and values, and takes the time of reading and writing them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trivet.launch import lean
from trivet.ops.packed import ChunkTable

ELIMINATED = 8
"""Tokens of a diagonal block that is inverted by elimination. The inverse of larger blocks comes of smaller ones'."""

LEAST_WIDTH, MOST_WIDTH = 64, 128
"""Key or value dimensions that a program multiplies at once."""

WARPS = 4


@triton.jit
def _chunk(chunk, starts, chunks, CHUNK: tl.constexpr):
    """A chunk of the table: its first token, and how many its segment has from there on, as int32."""
    segment = tl.load(chunks + 2 * chunk)
    number = tl.load(chunks + 2 * chunk + 1)
    start = tl.load(starts + segment)
    left = (tl.load(starts + segment + 1) - start - number * CHUNK).to(tl.int32)
    return start + number * CHUNK, left


@triton.jit
def _inverse(system, CHUNK: tl.constexpr, ELIMINATED: tl.constexpr, DOUBLINGS: tl.constexpr):
    """``(I + system)^-1``, float32 ``[CHUNK, CHUNK]``, of a system strictly below the diagonal."""
    blocks: tl.constexpr = CHUNK // ELIMINATED
    block, t = tl.arange(0, blocks), tl.arange(0, ELIMINATED)
    same = block[:, None, None, None] == block[None, None, :, None]
    parts = tl.reshape(system, (blocks, ELIMINATED, blocks, ELIMINATED))
    diagonal = tl.sum(tl.where(same, parts, 0.0), axis=2)
    solved = tl.where(t[None, :, None] == t[None, None, :], 1.0, tl.zeros_like(diagonal))
    for token in range(ELIMINATED - 1):
        factors = tl.sum(tl.where(t[None, None, :] == token, diagonal, 0.0), axis=2)
        row = tl.sum(tl.where(t[None, :, None] == token, solved, 0.0), axis=1)
        solved -= factors[:, :, None] * row[:, None, :]
    inverse = tl.reshape(tl.where(same, solved[:, :, None, :], 0.0), (CHUNK, CHUNK))
    # [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]], for all pairs of solved blocks at once. Nothing here is
    # larger than the chunk is long, so that float16 holds it, to as many digits as the matrix instructions for float32.
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    for doubling in tl.static_range(DOUBLINGS):
        size = ELIMINATED << doubling
        below = (i // size != j // size) & (i // (2 * size) == j // (2 * size))
        half = inverse.to(tl.float16)
        crossed = tl.dot(tl.where(below, system, 0.0).to(tl.float16), half)
        inverse -= tl.dot(half, crossed.to(tl.float16))
    return inverse


@lean
@triton.jit
def _delta_systems_kernel(
    query,
    key,
    decay,
    beta,
    weights,
    inverses,
    starts,
    chunks,
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ELIMINATED: tl.constexpr,
    DOUBLINGS: tl.constexpr,
):
    """Program ``chunk * value heads + value head``."""
    head = tl.program_id(0) % VALUE_HEADS
    first, left = _chunk(tl.program_id(0) // VALUE_HEADS, starts, chunks, CHUNK)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    k, t = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
    there = t < left
    full = there[:, None] & (k < KEY_DIM)[None, :]
    key_at = t[:, None] * (KEY_HEADS * KEY_DIM) + key_head * KEY_DIM + k[None, :]
    gate_at = t * VALUE_HEADS + head
    keys = tl.load(key + first * (KEY_HEADS * KEY_DIM) + key_at, mask=full, other=0.0)
    asked = tl.load(query + first * (KEY_HEADS * KEY_DIM) + key_at, mask=full, other=0.0)
    logs = tl.load(decay + first * VALUE_HEADS + gate_at, mask=there, other=0.0)
    strength = tl.load(beta + first * VALUE_HEADS + gate_at, mask=there, other=0.0)

    seen = (t[:, None] >= t[None, :]) & there[:, None]
    faded = tl.where(seen, tl.exp2(logs[:, None] - logs[None, :]), 0.0)
    pair_at = first * (VALUE_HEADS * CHUNK) + (t[:, None] * (VALUE_HEADS * CHUNK) + head * CHUNK + t[None, :])
    weight = tl.dot(asked, tl.trans(keys)) * scale * faded
    tl.store(weights + pair_at, weight.to(weights.dtype.element_ty), mask=there[:, None])
    system = tl.where(t[:, None] > t[None, :], tl.dot(keys, tl.trans(keys)) * faded * strength[:, None], 0.0)
    inverse = _inverse(system, CHUNK, ELIMINATED, DOUBLINGS)
    tl.store(inverses + pair_at, inverse.to(inverses.dtype.element_ty), mask=there[:, None])


@lean
@triton.jit
def _delta_writes_kernel(
    key,
    value,
    decay,
    beta,
    inverses,
    readers,
    written,
    starts,
    chunks,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program ``chunk * value heads + value head``."""
    head = tl.program_id(0) % VALUE_HEADS
    first, left = _chunk(tl.program_id(0) // VALUE_HEADS, starts, chunks, CHUNK)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    dtype: tl.constexpr = written.dtype.element_ty
    k, t, v = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK), tl.arange(0, BLOCK_V)
    there = t < left
    gate_at = t * VALUE_HEADS + head
    logs = tl.load(decay + first * VALUE_HEADS + gate_at, mask=there, other=0.0)
    strength = tl.load(beta + first * VALUE_HEADS + gate_at, mask=there, other=0.0)
    pair_at = t[:, None] * (VALUE_HEADS * CHUNK) + head * CHUNK + t[None, :]
    inverse = tl.load(inverses + first * (VALUE_HEADS * CHUNK) + pair_at, mask=there[:, None], other=0.0)

    key_at = t[:, None] * (KEY_HEADS * KEY_DIM) + key_head * KEY_DIM + k[None, :]
    reader_at = t[:, None] * (VALUE_HEADS * KEY_DIM) + head * KEY_DIM + k[None, :]
    read_strength = strength * tl.exp2(logs)
    for begin in tl.static_range(0, KEY_DIM, BLOCK_K):
        inside = there[:, None] & (begin + k < KEY_DIM)[None, :]
        keys = tl.load(key + first * (KEY_HEADS * KEY_DIM) + begin + key_at, mask=inside, other=0.0)
        reader = tl.dot(inverse, (keys * read_strength[:, None]).to(dtype))
        tl.store(readers + first * (VALUE_HEADS * KEY_DIM) + begin + reader_at, reader.to(dtype), mask=inside)
    value_at = t[:, None] * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + v[None, :]
    for begin in tl.static_range(0, VALUE_DIM, BLOCK_V):
        inside = there[:, None] & (begin + v < VALUE_DIM)[None, :]
        values = tl.load(value + first * (VALUE_HEADS * VALUE_DIM) + begin + value_at, mask=inside, other=0.0)
        change = tl.dot(inverse, (values * strength[:, None]).to(dtype))
        tl.store(written + first * (VALUE_HEADS * VALUE_DIM) + begin + value_at, change.to(dtype), mask=inside)


def delta_systems(query: Tensor, key: Tensor, decay: Tensor, beta: Tensor, table: ChunkTable) -> tuple[Tensor, Tensor]:
    """Solve every chunk's system.

    Args:
        query, key, decay, beta: as `trivet.ops.fused.delta_inputs.DeltaInputs` has them, all contiguous.
        table: the rows.

    Returns:
        both ``[tokens, value_heads, chunk]``, in the dtype of `key`: how each token's output weighs what the tokens of
        its chunk write, which are decayed products of its query and their keys; and the inverses of the systems. Both
        are zero for later tokens.
    """
    (tokens, key_heads, key_dim), heads = key.shape, decay.shape[1]
    doublings = (table.chunk_tokens // ELIMINATED).bit_length() - 1
    weights, inverses = (key.new_empty((tokens, heads, table.chunk_tokens)) for _ in range(2))
    _delta_systems_kernel[(len(table.chunks) * heads,)](
        query, key, decay, beta, weights, inverses, table.starts, table.chunks, key_dim**-0.5,
        key_heads, heads, key_dim, table.chunk_tokens, _tile(key_dim), ELIMINATED, doublings,
        num_warps=WARPS,
    )  # fmt: skip
    return weights, inverses


def delta_writes(
    key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, inverses: Tensor, table: ChunkTable
) -> tuple[Tensor, Tensor]:
    """What tokens read of the state before their chunk, and what they write into it.

    Rounds keys and values to their dtype once more after they are weighed.

    Args:
        key, value, decay, beta: as `trivet.ops.fused.delta_inputs.DeltaInputs` has them, all contiguous.
        inverses: as `delta_systems` makes them.
        table: the rows.

    Returns:
        in the dtype of `value`: ``[tokens, value_heads, key_dim]``, with what each token reads that state, and
        ``[tokens, value_heads, value_dim]``, what each token would write if that state were zero.
    """
    (tokens, key_heads, key_dim), (_, heads, value_dim) = key.shape, value.shape
    readers, written = key.new_empty((tokens, heads, key_dim)), torch.empty_like(value)
    _delta_writes_kernel[(len(table.chunks) * heads,)](
        key, value, decay, beta, inverses, readers, written, table.starts, table.chunks,
        key_heads, heads, key_dim, value_dim, table.chunk_tokens,
        min(_tile(key_dim), MOST_WIDTH), min(_tile(value_dim), MOST_WIDTH), num_warps=WARPS,
    )  # fmt: skip
    return readers, written


def _tile(width: int) -> int:
    """The dimensions of a tile that holds `width`."""
    return max(1 << (width - 1).bit_length(), LEAST_WIDTH)
