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

RUN_TOKENS = 8
"""Consecutive tokens of a chunk that a thread takes: the more, the fewer are loaded by two threads."""

GATED_HEADS = 16
"""Value heads of a program that computes gates."""

TAIL_BLOCK = 256
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


@triton.jit
def _silu(x, ON_DEVICE: tl.constexpr):
    """`trivet.ops.fused.gates.silu` in five instructions: neither infinity nor numbers next to zero need more here."""
    if ON_DEVICE:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 grown;
            mul.ftz.f32 grown, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 grown, grown;
            add.ftz.f32 grown, grown, 0f3F800000;
            rcp.approx.ftz.f32 grown, grown;
            mul.f32 $0, $1, grown;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return silu(x)


@triton.jit
def _widened(x, ON_DEVICE: tl.constexpr):
    """In float32: of bfloat16 one instruction a number, where a plain conversion takes two of every other number."""
    if ON_DEVICE and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


@triton.jit
def _rounded(x, dtype: tl.constexpr, ON_DEVICE: tl.constexpr):
    """To another type and back: two numbers of bfloat16 at once, since one takes four times as long."""
    if ON_DEVICE and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xFFFF0000;
            }""",
            "=f,=f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def _head(
    x,
    conv_weight,
    tail,
    out,
    behind,
    left,
    projected_stride,
    tail_channel_stride,
    tail_tap_stride,
    OUT_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    RUN: tl.constexpr,
    UNIT_LENGTH: tl.constexpr,
    NEW_TAIL: tl.constexpr,
    LENGTH_EPS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """One head of a chunk.

    `x`, `tail` and `out` are at the head, `x` and `out` at the chunk's first token, too. `behind` tokens of the row
    come before that one, and `left` tokens of the segment from it on. A thread loads each token of its run once.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    d = tl.arange(0, BLOCK)
    channel = d[None, :]
    within = channel < WIDTH
    first = (tl.arange(0, CHUNK // RUN) * RUN)[:, None]
    chunk_length = tl.minimum(left, CHUNK).to(tl.int32)
    # All is loaded before the first store and before threads wait for each other, since loads behind these start late.
    # A channel's taps lie together, and one load takes them; a sum picks one out, of which there is one term.
    which = tl.arange(0, BLOCK_T)[None, :]
    taps_at = conv_weight + d[:, None] * TAPS + which
    taps = tl.load(taps_at, mask=(d < WIDTH)[:, None] & (which < TAPS), other=0.0)
    x_at = x + first * projected_stride + channel
    run: tl.tuple = ()
    for step in tl.static_range(RUN):
        seen = within & (first + step < chunk_length)
        run = run + (tl.load(x_at + step * projected_stride, mask=seen, other=0.0),)  # noqa: RUF005
    if TAPS == 1:
        past: tl.tuple = ()
    elif behind < TAPS - 1:
        past = ()
        looks_back = behind.to(tl.int32)
        tail_at = tail + channel * tail_channel_stride
        for step in tl.static_range(1 - TAPS, 0):
            # Behind its row's first tokens a segment looks back at the tokens before it, which lie there, as chunks do.
            place = looks_back + first + step
            seen = within & (place >= 0) & (first + step < chunk_length)
            token = tl.load(x_at + step * projected_stride, mask=seen, other=0.0)
            entry = TAPS - 1 + place
            carried = tl.load(tail_at + entry * tail_tap_stride, mask=within & (place < 0), other=0.0)
            past = past + (_widened(tl.where(place < 0, carried, token), ON_DEVICE),)  # noqa: RUF005
        if NEW_TAIL:
            entry = tl.arange(0, BLOCK_T)[:, None]
            source = left + entry
            kept = within & (entry < TAPS - 1)
            old = tl.load(tail_at + source * tail_tap_stride, mask=kept & (source < TAPS - 1), other=0.0)
            new_at = x + (source - (TAPS - 1)) * projected_stride + channel
            new = tl.load(new_at, mask=kept & (source >= TAPS - 1), other=0.0)
            # Every thread has read what one of them writes over; no other program reads or writes it.
            tl.debug_barrier()
            tl.store(tail_at + entry * tail_tap_stride, tl.where(source < TAPS - 1, old, new), mask=kept)
    else:
        past = ()
        for step in tl.static_range(1 - TAPS, 0):
            seen = within & (first + step < chunk_length)
            token = tl.load(x_at + step * projected_stride, mask=seen, other=0.0)
            past = past + (_widened(token, ON_DEVICE),)  # noqa: RUF005

    weights: tl.tuple = ()
    for tap in tl.static_range(TAPS):
        weights = weights + (tl.sum(tl.where(which == tap, taps.to(tl.float32), 0.0), 1)[None, :],)  # noqa: RUF005
    out_at = out + first * OUT_STRIDE + channel
    tokens = past
    for step in tl.static_range(RUN):
        tokens = tokens + (_widened(run[step], ON_DEVICE),)  # noqa: RUF005
        mixed = tokens[step + TAPS - 1] * weights[TAPS - 1]
        for back in tl.static_range(1, TAPS):
            mixed += tokens[step + TAPS - 1 - back] * weights[TAPS - 1 - back]
        mixed = _silu(mixed, ON_DEVICE)
        if UNIT_LENGTH:
            mixed = _rounded(mixed, dtype, ON_DEVICE)
            mixed *= tl.rsqrt(tl.sum(mixed * mixed, 1) + LENGTH_EPS)[:, None]
        tl.store(out_at + step * OUT_STRIDE, mixed.to(dtype), mask=within & (first + step < chunk_length))


@triton.jit
def _gates(
    gates,
    a_log,
    dt_bias,
    decay,
    beta,
    first_head,
    left,
    projected_stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LOG2: tl.constexpr,
):
    """Some heads of a chunk, at whose first token and head 0 the pointers to gates, decays and betas are."""
    dtype: tl.constexpr = gates.dtype.element_ty
    head = first_head + tl.arange(0, BLOCK)
    token = tl.arange(0, CHUNK)[:, None]
    gated = head < HEADS
    inside = gated[None, :] & (token < left)
    gates += token * projected_stride + head[None, :]
    rate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gates + HEADS, mask=inside, other=0.0).to(tl.float32)
    head_log = tl.load(a_log + head, mask=gated, other=0.0).to(tl.float32)[None, :]
    head_bias = tl.load(dt_bias + head, mask=gated, other=0.0).to(tl.float32)[None, :]
    logs = tl.where(inside, log_decay(a, head_log, head_bias), 0.0)
    gate_at = token * HEADS + head[None, :]
    tl.store(decay + gate_at, tl.cumsum(logs, 0) * LOG2, mask=inside)
    tl.store(beta + gate_at, (1.0 / (1.0 + tl.exp(-rate))).to(dtype).to(tl.float32), mask=inside)


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
    RUN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GATED: tl.constexpr,
    LENGTH_EPS: tl.constexpr,
    LOG2: tl.constexpr,
    NEW_TAILS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program ``(heads, chunk)``: gates of `GATED` heads each, then query heads, then key heads, then value heads."""
    if DEPENDENT:
        gdc_launch_dependents()
    gate_programs: tl.constexpr = (VALUE_HEADS + GATED - 1) // GATED
    head = tl.program_id(0) - gate_programs
    chunk = tl.program_id(1).to(tl.int64)
    segment, number = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    start = tl.load(starts + segment)
    left = tl.load(starts + segment + 1) - start - number * CHUNK
    row, before = tl.load(segments + 3 * segment), tl.load(segments + 3 * segment + 1)
    slot = tl.load(slots + row).to(tl.int64)
    if DEPENDENT:
        # Neither table nor slots are of the kernels that may still be at work.
        gdc_wait()
    behind = before + number * CHUNK
    first_token = start + number * CHUNK
    x = projected + first_token * projected_stride
    tail = tails + slot * tail_stride
    key_channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    if head < 0:
        gates = x + (key_channels + 2 * VALUE_HEADS * VALUE_DIM)
        _gates(
            gates, a_log, dt_bias, decay + first_token * VALUE_HEADS, beta + first_token * VALUE_HEADS,
            (head + gate_programs) * GATED, left, projected_stride, VALUE_HEADS, GATED, CHUNK, LOG2,
        )  # fmt: skip
    elif head < 2 * KEY_HEADS:
        sort = head // KEY_HEADS  # queries, then keys
        out = pairs + ((sort * tokens + first_token) * KEY_HEADS + head % KEY_HEADS) * KEY_DIM
        channel = head * KEY_DIM
        _head(
            x + channel, conv_weight + channel * TAPS, tail + channel * tail_channel_stride, out, behind, left,
            projected_stride, tail_channel_stride, tail_tap_stride, KEY_HEADS * KEY_DIM, KEY_DIM, BLOCK_K, TAPS,
            BLOCK_T, CHUNK, RUN, True, NEW_TAILS, LENGTH_EPS, ON_DEVICE,
        )  # fmt: skip
    else:
        value_head = head - 2 * KEY_HEADS
        out = value + (first_token * VALUE_HEADS + value_head) * VALUE_DIM
        channel = key_channels + value_head * VALUE_DIM
        _head(
            x + channel, conv_weight + channel * TAPS, tail + channel * tail_channel_stride, out, behind, left,
            projected_stride, tail_channel_stride, tail_tap_stride, VALUE_HEADS * VALUE_DIM, VALUE_DIM, BLOCK_V, TAPS,
            BLOCK_T, CHUNK, RUN, False, NEW_TAILS, LENGTH_EPS, ON_DEVICE,
        )  # fmt: skip


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
    row = tl.program_id(1).to(tl.int64)
    channel = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    first, last = tl.load(row_segments + row), tl.load(row_segments + row + 1) - 1
    start, end = tl.load(starts + first), tl.load(starts + last + 1)
    slot = tl.load(slots + row).to(tl.int64)
    if DEPENDENT:
        gdc_wait()
    entry = tl.arange(0, BLOCK_T)[:, None]
    inside = (channel < channels) & (entry < TAPS - 1)
    tail = tails + slot * tail_stride + channel * tail_channel_stride
    # Counted from the oldest carried entry, a row is its carried tail followed by its tokens.
    x = projected + (start - (TAPS - 1)) * projected_stride + channel
    for segment in range(first, last):
        source = tl.load(starts + segment + 1) - start + entry
        carried = tl.load(tail + source * tail_tap_stride, mask=inside & (source < TAPS - 1), other=0.0)
        inputs = tl.load(x + source * projected_stride, mask=inside & (source >= TAPS - 1), other=0.0)
        kept = kept_tails + tl.load(segments + 3 * segment + 2) * tail_stride + channel * tail_channel_stride
        tl.store(kept + entry * tail_tap_stride, tl.where(source < TAPS - 1, carried, inputs), mask=inside)
    source = end - start + entry
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
    block_k, block_v = triton.next_power_of_2(recurrent.key_dim), triton.next_power_of_2(recurrent.value_dim)
    block_t = triton.next_power_of_2(taps)
    # Without cuts a row is one segment, and only the programs of its first chunk read its tail: they may write it, too.
    new_tails = not table.cuts
    _delta_inputs_kernel[(2 * recurrent.key_heads + heads + triton.cdiv(heads, GATED_HEADS), len(table.chunks))](
        projected, conv_weight, a_log, dt_bias, tails, slots, table.starts, table.chunks, table.segments,
        pairs, value, decay, beta, tokens, *strides, recurrent.key_heads, heads, recurrent.key_dim,
        recurrent.value_dim, taps, table.chunk_tokens, RUN_TOKENS, block_k, block_v, block_t, GATED_HEADS,
        UNIT_LENGTH_EPS, LOG2_E, new_tails, projected.is_cuda, dependent,
        num_warps=warps, launch_pdl=dependent,
    )  # fmt: skip
    if taps > 1 and not new_tails:
        channels = recurrent.conv_channels
        _new_tails_kernel[(-(-channels // TAIL_BLOCK), len(slots))](
            projected, tails, tails if kept_tails is None else kept_tails, slots, table.starts, table.segments,
            table.row_segments, channels, *strides, taps, TAIL_BLOCK, block_t, dependent,
            num_warps=4, launch_pdl=dependent,
        )  # fmt: skip
    return DeltaInputs(pairs[0], pairs[1], value, decay, beta)
