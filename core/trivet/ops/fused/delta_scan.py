# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The chunked delta rule from chunk to chunk: each row's state advances in its slot, and is kept where a row is cut.

Outputs are read beside that, so that no chunk's state leaves its multiprocessor.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from attrs import evolve, frozen
from torch import Tensor

from trivet.capacity.chunks import LEAST_TILE
from trivet.launch import lean
from trivet.ops.packed import ChunkTable

LEAST_COLUMNS = 32
"""Value dimensions of four warps, at least: with fewer, Triton 3.6 builds a kernel that faults on an H200."""


@frozen
class ScanConfig:
    """How the scan is launched.

    Attributes:
        columns: value dimensions of a program, a power of two; fewer where heads are narrower.
        warps: of a program; fewer where columns are few.
        stages: of loads ahead.
    """

    columns: int
    warps: int
    stages: int


FASTEST = ScanConfig(columns=64, warps=8, stages=3)
"""Of those measured on an H200."""

THREE_STAGES_BYTES = 196_608
"""Of shared memory, which the scan takes there."""


def config_within(room_bytes: int) -> ScanConfig:
    """`FASTEST`, with fewer stages where a program's shared memory has no room for them: they change no bit."""
    return FASTEST if room_bytes >= THREE_STAGES_BYTES else evolve(FASTEST, stages=2)


@cache
def served_config(device: int) -> ScanConfig:
    """What fits the device of this number; -1 where kernels are interpreted."""
    if device < 0:
        return FASTEST
    return config_within(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


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
    config: ScanConfig | None = None,
) -> None:
    """Advance the states of all rows over their chunks, and read the outputs.

    Rounds to the dtype of `written` what matrix products take, as the library's kernels do: the state before a chunk,
    each token's change, that change as decayed to the chunk's end, and `weights`.

    Args:
        query, key: ``[tokens, key_heads, key_dim]``.
        weights: as `trivet.ops.fused.delta_systems.delta_systems` makes them.
        readers: ``[tokens, value_heads, key_dim]``, with what each token reads the state before its chunk.
        written: ``[tokens, value_heads, value_dim]``, what each token would write if that state were zero. Becomes
            the outputs.
        decay: float32 ``[tokens, value_heads]``, as `trivet.ops.fused.delta_inputs.DeltaInputs` has it.
        states: float32 ``[slots, value_heads, key_dim, value_dim]``, each slot contiguous. Changed in place.
        kept_states: float32 ``[snapshots, value_heads, key_dim, value_dim]``, of the strides of `states`; None if the
            table has no cuts.
        slots: int64 ``[rows]``, different from each other.
        table: the rows.
        config: None: as `served_config` says.
    """
    config = config or served_config(key.get_device())
    (_, key_heads, key_dim), (_, heads, value_dim) = key.shape, written.shape
    block_k = max(triton.next_power_of_2(key_dim), LEAST_TILE)
    block_v = max(min(config.columns, triton.next_power_of_2(value_dim)), LEAST_COLUMNS)
    warps = min(config.warps, 4 * block_v // LEAST_COLUMNS)
    _delta_scan_kernel[(triton.cdiv(value_dim, block_v), heads, len(slots))](
        query, key, weights, readers, written, decay, states, states if kept_states is None else kept_states, slots,
        table.starts, table.segments, table.row_segments, key_dim**-0.5, states.stride(0),
        key_heads, heads, key_dim, value_dim, table.chunk_tokens, block_k, block_v,
        num_warps=warps, num_stages=config.stages,
    )  # fmt: skip
