# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The chunked delta rule from chunk to chunk: each row's state advances in its slot, and is kept where a row is cut.

Outputs are read beside that, so that no chunk's state leaves its multiprocessor.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trivet.launch import lean
from trivet.ops.packed import ChunkTable
from trivet.reservation.recurrent import LEAST_TILE

LEAST_COLUMNS = 32
"""Value dimensions of four warps, at least: with fewer, Triton 3.6 builds a kernel that faults on an H200."""

WEIGHT_WARPS = 4
"""Of a program of the kernel of the weights."""


@lean
@triton.jit
def _delta_weights_kernel(
    query,
    key,
    decay,
    inverse,
    weights,
    starts,
    chunks,
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SOLVED: tl.constexpr,
):
    """Program ``(chunk, key head)``."""
    key_head = tl.program_id(1)
    segment = tl.load(chunks + 2 * tl.program_id(0))
    start = tl.load(starts + segment)
    number = tl.load(chunks + 2 * tl.program_id(0) + 1)
    left = (tl.load(starts + segment + 1) - start - number * CHUNK).to(tl.int32)
    first = start + number * CHUNK
    k, t = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
    there = t < left
    full = there[:, None] & (k < KEY_DIM)[None, :]
    key_at = t[:, None] * (KEY_HEADS * KEY_DIM) + key_head * KEY_DIM + k[None, :]
    asked = tl.load(query + first * (KEY_HEADS * KEY_DIM) + key_at, mask=full, other=0.0)
    keys = tl.load(key + first * (KEY_HEADS * KEY_DIM) + key_at, mask=full, other=0.0)
    products = tl.dot(asked, tl.trans(keys)) * scale
    seen = t[:, None] >= t[None, :]
    above = there[:, None] & (t[:, None] // SOLVED < t[None, :] // SOLVED)
    weight_at = t[:, None] * (VALUE_HEADS * CHUNK) + t[None, :]
    group: tl.constexpr = VALUE_HEADS // KEY_HEADS
    for member in range(group):
        head = key_head * group + member
        logs = tl.load(decay + first * VALUE_HEADS + t * VALUE_HEADS + head, mask=there, other=0.0)
        weight = tl.where(seen, products * tl.exp2(logs[:, None] - logs[None, :]), 0.0)
        chunk = (first * VALUE_HEADS + head) * CHUNK
        tl.store(weights + chunk + weight_at, weight.to(weights.dtype.element_ty), mask=there[:, None])
        # Blocks above the diagonal are read of the inverse, and the kernel that makes it leaves them out.
        tl.store(inverse + chunk + weight_at, tl.zeros_like(weight).to(inverse.dtype.element_ty), mask=above)


def delta_weights(
    query: Tensor, key: Tensor, decay: Tensor, table: ChunkTable, inverse: Tensor, weights: Tensor, solved_tokens: int
) -> None:
    """How each token's output weighs what the tokens of its chunk write: decayed products of its query and their keys.

    Args:
        query, key: ``[tokens, key_heads, key_dim]``.
        decay: float32 ``[tokens, value_heads]``, as `trivet.ops.fused.delta_inputs.DeltaInputs` has it.
        table: the rows.
        inverse: ``[tokens, value_heads, chunk]``, the inverses of the chunks' systems, before or behind the kernel that
            makes them. Its blocks above the diagonal become zeros.
        weights: of the shape of `inverse`; the weights, of which those of later tokens are zeros.
        solved_tokens: tokens of a diagonal block of the inverse.
    """
    (_, key_heads, key_dim), heads = key.shape, decay.shape[1]
    _delta_weights_kernel[(len(table.chunks), key_heads)](
        query, key, decay, inverse, weights, table.starts, table.chunks, key_dim**-0.5,
        key_heads, heads, key_dim, table.chunk_tokens, max(triton.next_power_of_2(key_dim), LEAST_TILE), solved_tokens,
        num_warps=WEIGHT_WARPS,
    )  # fmt: skip


@lean
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _delta_scan_kernel(
    query,
    key,
    weights,
    readers,
    written,
    decay,
    states,
    kept_states,
    slots,
    starts,
    segments,
    row_segments,
    scale,
    state_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program ``(block of value dimensions, value head, row)``."""
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    dtype: tl.constexpr = written.dtype.element_ty
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    t = tl.arange(0, CHUNK)
    k_inside, v_inside = k < KEY_DIM, v < VALUE_DIM
    if VALUE_DIM % BLOCK_V == 0:
        v_inside = tl.full((BLOCK_V,), True, tl.int1)
    inside = k_inside[:, None] & v_inside[None, :]
    # Places within one slot, one chunk's states, and one chunk's tokens.
    state_at = (head * KEY_DIM + k[:, None]) * VALUE_DIM + v[None, :]
    key_at = t[:, None] * (KEY_HEADS * KEY_DIM) + key_head * KEY_DIM + k[None, :]
    weight_at = t[:, None] * (VALUE_HEADS * CHUNK) + head * CHUNK + t[None, :]
    reader_at = t[:, None] * (VALUE_HEADS * KEY_DIM) + head * KEY_DIM + k[None, :]
    written_at = t[:, None] * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + v[None, :]
    log_at = t * VALUE_HEADS + head

    slot = states + tl.load(slots + row).to(tl.int64) * state_stride
    state = tl.load(slot + state_at, mask=inside, other=0.0)
    for segment in range(tl.load(row_segments + row), tl.load(row_segments + row + 1)):
        start = tl.load(starts + segment)
        length = (tl.load(starts + segment + 1) - start).to(tl.int32)
        snapshot = tl.load(segments + 3 * segment + 2)
        # Values and decays come into registers a chunk ahead: shared memory is left to what products take.
        own = (t < length)[:, None] & v_inside[None, :]
        value = tl.load(written + start * (VALUE_HEADS * VALUE_DIM) + written_at, mask=own, other=0.0)
        logs = tl.load(decay + start * VALUE_HEADS + log_at, mask=t < length, other=0.0)
        last_log = tl.load(decay + (start + tl.minimum(length, CHUNK) - 1) * VALUE_HEADS + head)
        for number in range(tl.cdiv(length, CHUNK)):
            first = start + number * CHUNK
            left = length - number * CHUNK
            there = t < left
            own = there[:, None] & v_inside[None, :]
            full = there[:, None] & k_inside[None, :]
            read = tl.load(readers + first * (VALUE_HEADS * KEY_DIM) + reader_at, mask=full, other=0.0)
            keys = tl.load(key + first * (KEY_HEADS * KEY_DIM) + key_at, mask=full, other=0.0)
            asked = tl.load(query + first * (KEY_HEADS * KEY_DIM) + key_at, mask=full, other=0.0)
            weight = tl.load(weights + first * (VALUE_HEADS * CHUNK) + weight_at, mask=there[:, None], other=0.0)
            values_at = written + first * (VALUE_HEADS * VALUE_DIM) + written_at
            logs_at = decay + first * VALUE_HEADS + log_at
            last = tl.maximum(tl.minimum(left - CHUNK, CHUNK), 1) - 1
            last_at = decay + (first + CHUNK + last) * VALUE_HEADS + head
            follows = t < left - CHUNK
            next_value = tl.load(
                values_at + CHUNK * VALUE_HEADS * VALUE_DIM, mask=follows[:, None] & v_inside[None, :], other=0.0
            )
            next_logs = tl.load(logs_at + CHUNK * VALUE_HEADS, mask=follows, other=0.0)
            next_last_log = tl.load(last_at, mask=left > CHUNK, other=0.0)

            rounded = state.to(dtype)
            change = value.to(tl.float32) - tl.dot(read, rounded)
            # No sum of two products, which Triton would make a chain of, for which both halves of eight warps would
            # compute the same.
            asking = tl.broadcast_to((tl.exp2(logs) * scale)[:, None], (CHUNK, BLOCK_V))
            out = tl.fma(tl.dot(asked, rounded), asking, tl.dot(weight, change.to(dtype)))
            tl.store(values_at, out.to(dtype), mask=own)
            # What is left of each token's change at the chunk's end; no token is behind it.
            remaining = tl.where(there, tl.exp2(last_log - logs), 0.0)
            change = (change * remaining[:, None]).to(dtype)
            state = tl.dot(tl.trans(keys), change, state * tl.exp2(last_log))
            value, logs, last_log = next_value, next_logs, next_last_log
        # The last segment of a row, and no other, ends where no snapshot is.
        if snapshot < 0:
            place = states + tl.load(slots + row).to(tl.int64) * state_stride
        else:
            place = kept_states + snapshot * state_stride
        tl.store(place + state_at, state, mask=inside)


def delta_scan(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    readers: Tensor,
    written: Tensor,
    decay: Tensor,
    states: Tensor,
    kept_states: Tensor | None,
    slots: Tensor,
    table: ChunkTable,
    config: dict[str, int],
) -> None:
    """Advance the states of all rows over their chunks, and read the outputs.

    Rounds to the dtype of `written` what matrix products take, as the library's kernels do: the state before a chunk,
    each token's change, that change as decayed to the chunk's end, and `weights`.

    Args:
        query, key: ``[tokens, key_heads, key_dim]``.
        weights: as `delta_weights` makes them.
        readers: ``[tokens, value_heads, key_dim]``, with what each token reads the state before its chunk.
        written: ``[tokens, value_heads, value_dim]``, what each token would write if that state were zero. Becomes
            the outputs.
        decay: float32 ``[tokens, value_heads]``, as `trivet.ops.fused.delta_inputs.DeltaInputs` has it.
        states: float32 ``[slots, value_heads, key_dim, value_dim]``, each slot contiguous. Changed in place.
        kept_states: float32 ``[snapshots, value_heads, key_dim, value_dim]``, of the strides of `states`; None if the
            table has no cuts.
        slots: int64 ``[rows]``, different from each other.
        table: the rows.
        config: ``BLOCK_V``, the value dimensions of a program, a power of two; ``num_warps`` and ``num_stages``.
    """
    (_, key_heads, key_dim), (_, heads, value_dim) = key.shape, written.shape
    block_k = max(triton.next_power_of_2(key_dim), LEAST_TILE)
    block_v = max(min(config["BLOCK_V"], triton.next_power_of_2(value_dim)), LEAST_COLUMNS)
    warps = min(config["num_warps"], 4 * block_v // LEAST_COLUMNS)
    _delta_scan_kernel[(triton.cdiv(value_dim, block_v), heads, len(slots))](
        query, key, weights, readers, written, decay, states, states if kept_states is None else kept_states, slots,
        table.starts, table.segments, table.row_segments, key_dim**-0.5, states.stride(0),
        key_heads, heads, key_dim, value_dim, table.chunk_tokens,
        **(config | {"BLOCK_K": block_k, "BLOCK_V": block_v, "num_warps": warps}),
    )  # fmt: skip
