# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""What the chunked delta rule is given, out of a layer's projection, in one kernel; and the tails that it leaves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trivet.geometry import RecurrentGeometry
from trivet.launch import lean
from trivet.ops.fused.device import dependent_launch
from trivet.ops.fused.gates import log_decay, silu
from trivet.ops.gated_delta import UNIT_LENGTH_EPS
from trivet.ops.packed import ChunkTable

LOG2_E = 1.4426950408889634
"""Decays are handed on as logarithms to base 2."""

WARPS = 8

TAIL_BLOCK = 1024
"""Channels of a program that writes tails."""


@frozen(eq=False)
class DeltaInputs:
    """Inputs of the chunked delta rule.

    Attributes:
        query, key: ``[tokens, key_heads, key_dim]``, of unit length.
        value: ``[tokens, value_heads, value_dim]``.
        decay: float32 ``[tokens, value_heads]``, logarithm to base 2 of the decay from the chunk's start to the token.
        beta: float32 ``[tokens, value_heads]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor


@lean
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def _delta_inputs_kernel(
    projected,
    conv_weight,
    a_log,
    dt_bias,
    tails,
    slots,
    starts,
    chunks,
    segments,
    pairs,
    value,
    decay,
    beta,
    tokens,
    projected_stride,
    tail_stride,
    tail_channel_stride,
    tail_tap_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LENGTH_EPS: tl.constexpr,
    LOG2: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program ``(head, chunk)``: query heads, then key heads, then value heads."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    segment, number = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    start = tl.load(starts + segment)
    length = tl.load(starts + segment + 1) - start
    row, before = tl.load(segments + 4 * segment), tl.load(segments + 4 * segment + 1)
    is_value = head >= 2 * KEY_HEADS
    value_head = head - 2 * KEY_HEADS
    width = tl.where(is_value, VALUE_DIM, KEY_DIM)
    first_channel = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + value_head * VALUE_DIM, head * KEY_DIM)
    d = tl.arange(0, BLOCK)
    within = (d < width)[None, :]
    channel = (first_channel + d)[None, :]
    position = (number * CHUNK + tl.arange(0, CHUNK))[:, None]
    there = position < length
    dtype: tl.constexpr = value.dtype.element_ty

    # A channel's taps lie together, and one load takes them. A sum picks one out, of which there is one term.
    which = tl.arange(0, BLOCK_T)[None, :]
    taps_at = conv_weight + (first_channel + d)[:, None] * TAPS + which
    taps = tl.load(taps_at, mask=(d < width)[:, None] & (which < TAPS), other=0.0).to(tl.float32)

    # Behind its row's first tokens a segment looks back at the tokens before it, which lie there, as chunks do.
    within_row = before + position
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    x = projected + start * projected_stride + channel
    for back in tl.static_range(TAPS):
        tap = tl.sum(tl.where(which == TAPS - 1 - back, taps, 0.0), 1)[None, :]
        seen = within & there & (within_row >= back)
        total += tl.load(x + (position - back) * projected_stride, mask=seen, other=0.0).to(tl.float32) * tap
    if before + number * CHUNK < TAPS - 1:
        tail = tails + tl.load(slots + row).to(tl.int64) * tail_stride + channel * tail_channel_stride
        for back in tl.static_range(1, TAPS):
            tap = tl.sum(tl.where(which == TAPS - 1 - back, taps, 0.0), 1)[None, :]
            entry = TAPS - 1 + within_row - back
            carried = tl.load(tail + entry * tail_tap_stride, mask=within & there & (within_row < back), other=0.0)
            total += carried.to(tl.float32) * tap
    mixed = silu(total).to(dtype)

    token = start + position
    if is_value:
        tl.store(value + (token * VALUE_HEADS + value_head) * VALUE_DIM + d[None, :], mixed, mask=within & there)
        place = number * CHUNK + tl.arange(0, CHUNK)
        inside = place < length
        gates = projected + (start + place) * projected_stride + 2 * KEY_HEADS * KEY_DIM + 2 * VALUE_HEADS * VALUE_DIM
        rate = tl.load(gates + value_head, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(gates + VALUE_HEADS + value_head, mask=inside, other=0.0).to(tl.float32)
        head_log, head_bias = tl.load(a_log + value_head).to(tl.float32), tl.load(dt_bias + value_head).to(tl.float32)
        logs = tl.where(inside, log_decay(a, head_log, head_bias), 0.0)
        gate_at = (start + place) * VALUE_HEADS + value_head
        tl.store(decay + gate_at, tl.cumsum(logs, 0) * LOG2, mask=inside)
        learned = (1.0 / (1.0 + tl.exp(-rate))).to(dtype).to(tl.float32)
        tl.store(beta + gate_at, learned, mask=inside)
    else:
        vectors = mixed.to(tl.float32)
        vectors *= tl.rsqrt(tl.sum(vectors * vectors, 1) + LENGTH_EPS)[:, None]
        sort = head // KEY_HEADS  # queries, then keys
        pair_at = ((sort * tokens + token) * KEY_HEADS + head % KEY_HEADS) * KEY_DIM + d[None, :]
        tl.store(pairs + pair_at, vectors.to(dtype), mask=within & there)


@lean
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _new_tails_kernel(
    projected,
    tails,
    kept_tails,
    slots,
    starts,
    segments,
    row_segments,
    channels,
    projected_stride,
    tail_stride,
    tail_channel_stride,
    tail_tap_stride,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program ``(block of channels, row)``."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    channel = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    first, last = tl.load(row_segments + row), tl.load(row_segments + row + 1) - 1
    start = tl.load(starts + first)
    entry = tl.arange(0, BLOCK_T)[:, None]
    inside = (channel < channels) & (entry < TAPS - 1)
    tail = tails + tl.load(slots + row).to(tl.int64) * tail_stride + channel * tail_channel_stride
    # Counted from the oldest carried entry, a row is its carried tail followed by its tokens.
    x = projected + (start - (TAPS - 1)) * projected_stride + channel
    for segment in range(first, last):
        source = tl.load(starts + segment + 1) - start + entry
        carried = tl.load(tail + source * tail_tap_stride, mask=inside & (source < TAPS - 1), other=0.0)
        inputs = tl.load(x + source * projected_stride, mask=inside & (source >= TAPS - 1), other=0.0)
        kept = kept_tails + tl.load(segments + 4 * segment + 3) * tail_stride + channel * tail_channel_stride
        tl.store(kept + entry * tail_tap_stride, tl.where(source < TAPS - 1, carried, inputs), mask=inside)
    source = tl.load(starts + last + 1) - start + entry
    carried = tl.load(tail + source * tail_tap_stride, mask=inside & (source < TAPS - 1), other=0.0)
    inputs = tl.load(x + source * projected_stride, mask=inside & (source >= TAPS - 1), other=0.0)
    # The row's own tail comes last, when every thread has read what one of them writes over.
    tl.debug_barrier()
    tl.store(tail + entry * tail_tap_stride, tl.where(source < TAPS - 1, carried, inputs), mask=inside)


def delta_inputs(
    projected: Tensor,
    recurrent: RecurrentGeometry,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    tails: Tensor,
    slots: Tensor,
    table: ChunkTable,
    kept_tails: Tensor | None = None,
    *,
    dependent: bool | None = None,
    warps: int = WARPS,
) -> DeltaInputs:
    """Convolve, split, norm and gate rows of any lengths, then write their new tails and those at their cuts.

    Rounds where `trivet.ops.convolution` and `trivet.ops.gated_delta` round, and queries and keys once more, at unit
    length.

    Args:
        projected: ``[tokens, elements]``, as `trivet.ops.fused.delta_decode.delta_decode` takes it.
        recurrent, conv_weight, a_log, dt_bias: likewise.
        tails: ``[slots, channels, taps - 1]``, any strides. Changed in place.
        slots: int64 ``[rows]``, different from each other.
        table: the rows.
        kept_tails: ``[snapshots, channels, taps - 1]``, of the strides of `tails`; None if the table has no cuts.
        dependent: start while the kernel before drains; None: as the device's table says.
        warps: of a program.
    """
    tokens, device = projected.shape[0], projected.device
    if dependent is None:
        dependent = dependent_launch(projected.get_device())
    heads, taps = recurrent.value_heads, recurrent.conv_kernel
    pairs = projected.new_empty((2, tokens, recurrent.key_heads, recurrent.key_dim))
    value = projected.new_empty((tokens, heads, recurrent.value_dim))
    decay = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    beta = torch.empty_like(decay)
    strides = (projected.stride(0), *tails.stride())
    block = triton.next_power_of_2(max(recurrent.key_dim, recurrent.value_dim))
    _delta_inputs_kernel[(2 * recurrent.key_heads + heads, len(table.chunks))](
        projected, conv_weight, a_log, dt_bias, tails, slots, table.starts, table.chunks, table.segments,
        pairs, value, decay, beta, tokens, *strides, recurrent.key_heads, heads, recurrent.key_dim,
        recurrent.value_dim, taps, table.chunk_tokens, block, triton.next_power_of_2(taps), UNIT_LENGTH_EPS, LOG2_E,
        dependent,
        num_warps=warps, launch_pdl=dependent,
    )  # fmt: skip
    if taps > 1:
        channels = recurrent.conv_channels
        _new_tails_kernel[(-(-channels // TAIL_BLOCK), len(slots))](
            projected, tails, tails if kept_tails is None else kept_tails, slots, table.starts, table.segments,
            table.row_segments, channels, *strides, taps, TAIL_BLOCK, triton.next_power_of_2(taps), dependent,
            num_warps=4, launch_pdl=dependent,
        )  # fmt: skip
    return DeltaInputs(pairs[0], pairs[1], value, decay, beta)
