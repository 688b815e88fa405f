# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The chunked delta rule from chunk to chunk: each row's state advances in its slot, and is kept where a row is cut."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trivet.launch import lean
from trivet.ops.packed import ChunkTable
from trivet.reservation.recurrent import LEAST_TILE

WIDE_KEYS = 128
"""Key dimensions beyond which chunks fill shared memory and states the registers, whatever is asked for."""

WIDE_CONFIG = {"BLOCK_V": 32, "num_warps": 8, "num_stages": 2}
"""What such heads take."""


@lean
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _delta_scan_kernel(
    key,
    readers,
    written,
    decay,
    states,
    kept_states,
    slots,
    starts,
    segments,
    row_segments,
    before,
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
    inside = k_inside[:, None] & v_inside[None, :]
    # Places within one slot, one chunk's states, and one chunk's tokens.
    state_at = (head * KEY_DIM + k[:, None]) * VALUE_DIM + v[None, :]
    key_at = t[:, None] * (KEY_HEADS * KEY_DIM) + key_head * KEY_DIM + k[None, :]
    reader_at = t[:, None] * (VALUE_HEADS * KEY_DIM) + head * KEY_DIM + k[None, :]
    written_at = t[:, None] * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + v[None, :]

    slot = states + tl.load(slots + row).to(tl.int64) * state_stride
    state = tl.load(slot + state_at, mask=inside, other=0.0)
    for segment in range(tl.load(row_segments + row), tl.load(row_segments + row + 1)):
        start = tl.load(starts + segment)
        length = tl.load(starts + segment + 1) - start
        first_chunk = tl.load(segments + 4 * segment + 2)
        snapshot = tl.load(segments + 4 * segment + 3)
        # Values and decays come into registers a chunk ahead: shared memory is left to what products take, of which
        # three stages fit two programs to a multiprocessor.
        own = (t < length)[:, None] & v_inside[None, :]
        value = tl.load(written + start * (VALUE_HEADS * VALUE_DIM) + written_at, mask=own, other=0.0)
        logs = tl.load(decay + (start + t) * VALUE_HEADS + head, mask=t < length, other=0.0)
        last_log = tl.load(decay + (start + tl.minimum(length, CHUNK) - 1) * VALUE_HEADS + head)
        for number in range(tl.cdiv(length, CHUNK)):
            first = start + number * CHUNK
            left = length - number * CHUNK
            there = t < left
            full = there[:, None] & k_inside[None, :]
            read = tl.load(readers + first * (VALUE_HEADS * KEY_DIM) + reader_at, mask=full, other=0.0)
            keys = tl.load(key + first * (KEY_HEADS * KEY_DIM) + key_at, mask=full, other=0.0)
            follows = t < left - CHUNK
            values_at = written + first * (VALUE_HEADS * VALUE_DIM) + written_at
            logs_at = decay + (first + t) * VALUE_HEADS + head
            last = tl.maximum(tl.minimum(left - CHUNK, CHUNK), 1) - 1
            next_value = tl.load(
                values_at + CHUNK * VALUE_HEADS * VALUE_DIM, mask=follows[:, None] & v_inside[None, :], other=0.0
            )
            next_logs = tl.load(logs_at + CHUNK * VALUE_HEADS, mask=follows, other=0.0)
            next_last_log = tl.load(decay + (first + CHUNK + last) * VALUE_HEADS + head, mask=left > CHUNK, other=0.0)

            rounded = state.to(dtype)
            chunk = first_chunk + number
            tl.store(before + chunk * (VALUE_HEADS * KEY_DIM * VALUE_DIM) + state_at, rounded, mask=inside)
            change = value.to(tl.float32) - tl.dot(read, rounded)
            tl.store(values_at, change.to(dtype), mask=there[:, None] & v_inside[None, :])
            # What is left of each token's change at the chunk's end; no token is behind it.
            remaining = tl.where(there, tl.exp2(last_log - logs), 0.0)
            change = (change * remaining[:, None]).to(dtype)
            state = tl.dot(tl.trans(keys), change, state * tl.exp2(last_log))
            value, logs, last_log = next_value, next_logs, next_last_log
        if snapshot >= 0:
            tl.store(kept_states + snapshot * state_stride + state_at, state, mask=inside)
    tl.store(slot + state_at, state, mask=inside)


def delta_scan(
    key: Tensor,
    readers: Tensor,
    written: Tensor,
    decay: Tensor,
    states: Tensor,
    kept_states: Tensor | None,
    slots: Tensor,
    table: ChunkTable,
    before: Tensor,
    config: dict[str, int],
) -> None:
    """Advance the states of all rows over their chunks.

    Rounds to the dtype of `written` what matrix products take, as the library's kernel does: the state before a chunk,
    and each token's change as decayed to the chunk's end.

    Args:
        key: ``[tokens, key_heads, key_dim]``.
        readers: ``[tokens, value_heads, key_dim]``, with what each token reads the state before its chunk.
        written: ``[tokens, value_heads, value_dim]``, what each token would write if that state were zero. Becomes
            what it writes.
        decay: float32 ``[tokens, value_heads]``, as `trivet.ops.fused.delta_inputs.DeltaInputs` has it.
        states: float32 ``[slots, value_heads, key_dim, value_dim]``, each slot contiguous. Changed in place.
        kept_states: float32 ``[snapshots, value_heads, key_dim, value_dim]``, of the strides of `states`; None if the
            table has no cuts.
        slots: int64 ``[rows]``, different from each other.
        table: the rows.
        before: ``[chunks, value_heads, key_dim, value_dim]``, in the dtype of `written`; the state before each chunk.
        config: ``BLOCK_V``, the value dimensions of a program, a power of two; ``num_warps`` and ``num_stages``.
            Key dimensions beyond `WIDE_KEYS` take `WIDE_CONFIG` instead.
    """
    (_, key_heads, key_dim), (_, heads, value_dim) = key.shape, written.shape
    block_k = max(triton.next_power_of_2(key_dim), LEAST_TILE)
    if block_k > WIDE_KEYS:
        config = WIDE_CONFIG
    block_v = max(min(config["BLOCK_V"], triton.next_power_of_2(value_dim)), LEAST_TILE)
    _delta_scan_kernel[(triton.cdiv(value_dim, block_v), heads, len(slots))](
        key, readers, written, decay, states, states if kept_states is None else kept_states, slots,
        table.starts, table.segments, table.row_segments, before, states.stride(0),
        key_heads, heads, key_dim, value_dim, table.chunk_tokens, **(config | {"BLOCK_K": block_k, "BLOCK_V": block_v}),
    )  # fmt: skip
