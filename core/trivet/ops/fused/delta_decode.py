# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""One token of each row through a Gated DeltaNet layer, between its two projections, in three kernels.

The middle kernel has a program for some columns of a head's state, so that one row has programs for the whole device
and many rows fill the memory bus. What columns share is done once, by the kernel before (convolution, unit length,
gates) and the kernel behind (the norm over a head, and the output gate). The first kernel alone writes tails, and a
channel is of one of its programs.

Any number of rows takes the same kernels, of the same blocks: a row's bits then do not depend on how many rows there
are, since what a block holds decides in which order its sums are taken.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trivet.capacity.fused import MOST_FUSED_TAPS, MOST_HEAD_WIDTH
from trivet.geometry import RecurrentGeometry
from trivet.launch import lean
from trivet.ops.fused.device import dependent_launch
from trivet.ops.fused.gated_norm import gated_rms_norm
from trivet.ops.fused.gates import log_decay, silu
from trivet.ops.gated_delta import UNIT_LENGTH_EPS

PREPARED_HEADS = 4
"""Heads of queries, keys and values that a program of the first kernel takes, one a warp."""

PACKED = (4, 2)
"""Taps, and bytes of one, that are loaded as one integer."""
PACKED_BYTES = PACKED[0] * PACKED[1]

LEAST_ELEMENTS_OF_A_WARP = 1024
"""Of a head's state: blocks that are smaller than served ones take fewer warps."""


@frozen
class StateBlocks:
    """How the state is divided among programs.

    Attributes:
        columns: of a head's state, at most; those of a value head where it is narrower.
        warps: of a program, at most.
    """

    columns: int = 64
    warps: int = 4


SERVED_BLOCKS = StateBlocks()
"""The fastest of those measured on an H200, or as fast as it, from one row to 64."""


def decode_serves(recurrent: RecurrentGeometry) -> bool:
    """Whether the kernels take heads of these widths and a convolution of this length."""
    return max(recurrent.key_dim, recurrent.value_dim) <= MOST_HEAD_WIDTH and recurrent.conv_kernel <= MOST_FUSED_TAPS


@lean
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _delta_prepare_kernel(
    projected,
    conv_weight,
    a_log,
    dt_bias,
    tails,
    slots,
    prepared,
    projected_stride,
    tail_stride,
    tail_channel_stride,
    tail_tap_stride,
    live_slots,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTH_EPS: tl.constexpr,
    PACKED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program ``(heads, row)``: query heads, then key heads, then value heads.

    `PACKED`: a channel's taps are loaded as one integer of 64 bits.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    first_head = tl.program_id(0) * HEADS
    head = first_head + tl.arange(0, HEADS)
    row = tl.program_id(1).to(tl.int64)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    rates_at: tl.constexpr = channels + VALUE_HEADS * VALUE_DIM
    dtype: tl.constexpr = projected.dtype.element_ty
    is_value = head >= 2 * KEY_HEADS
    value_head = head - 2 * KEY_HEADS
    d = tl.arange(0, BLOCK)
    there = head < 2 * KEY_HEADS + VALUE_HEADS
    if KEY_DIM == VALUE_DIM:
        channel = head[:, None] * KEY_DIM + d[None, :]
        inside = (d < KEY_DIM)[None, :] & there[:, None]
    else:
        first_channel = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + value_head * VALUE_DIM, head * KEY_DIM)
        channel = first_channel[:, None] + d[None, :]
        inside = (d[None, :] < tl.where(is_value, VALUE_DIM, KEY_DIM)[:, None]) & there[:, None]

    # Neither slots, tails nor parameters are of the kernels that may still be at work: those of this step's layer
    # before, between which and the last step lie kernels that wait for all before them.
    if PACKED:
        packed_at = conv_weight.to(tl.pointer_type(tl.int64), bitcast=True) + channel
        packed = tl.load(packed_at, mask=inside, other=0)
    slot = tl.load(slots + row).to(tl.int64)
    live = slot < live_slots
    there &= live
    inside &= live
    tail = tails + slot * tail_stride + channel * tail_channel_stride
    total = tl.zeros([HEADS, BLOCK], tl.float32)
    # Triton adds tuples, and unpacks none.
    past: tl.tuple = ()
    for entry in tl.static_range(TAPS - 1):
        past = past + (tl.load(tail + entry * tail_tap_stride, mask=inside, other=0.0),)  # noqa: RUF005
    for entry in tl.static_range(TAPS - 1):
        if PACKED:
            tap = (packed >> (16 * entry)).to(tl.int16).to(conv_weight.dtype.element_ty, bitcast=True).to(tl.float32)
        else:
            tap = tl.load(conv_weight + channel * TAPS + entry, mask=inside, other=0.0).to(tl.float32)
        total += past[entry].to(tl.float32) * tap
    if PACKED:
        tap = (packed >> (16 * (TAPS - 1))).to(tl.int16).to(conv_weight.dtype.element_ty, bitcast=True).to(tl.float32)
    else:
        tap = tl.load(conv_weight + channel * TAPS + (TAPS - 1), mask=inside, other=0.0).to(tl.float32)

    if DEPENDENT:
        gdc_wait()
    x = projected + row * projected_stride
    newest = tl.load(x + channel, mask=inside, other=0.0)
    past = past + (newest,)  # noqa: RUF005
    into = prepared + row * (channels + 2 * VALUE_HEADS)
    if first_head + HEADS > 2 * KEY_HEADS:
        gated = there & is_value
        rate = tl.load(x + rates_at + value_head, mask=gated, other=0.0).to(tl.float32)
        a = tl.load(x + rates_at + VALUE_HEADS + value_head, mask=gated, other=0.0).to(tl.float32)
        head_log = tl.load(a_log + value_head, mask=gated, other=0.0).to(tl.float32)
        head_bias = tl.load(dt_bias + value_head, mask=gated, other=0.0).to(tl.float32)
        tl.store(into + channels + value_head, tl.exp(log_decay(a, head_log, head_bias)), mask=gated)
        beta = (1.0 / (1.0 + tl.exp(-rate))).to(dtype).to(tl.float32)
        tl.store(into + channels + VALUE_HEADS + value_head, beta, mask=gated)

    # Rounded where the torch operations round; what they keep in float32 stays so.
    mixed = silu(total + newest.to(tl.float32) * tap).to(dtype).to(tl.float32)
    if first_head < 2 * KEY_HEADS:
        inverse_length = tl.rsqrt(tl.sum(mixed * mixed, 1) + LENGTH_EPS)
        mixed *= tl.where(is_value, 1.0, inverse_length)[:, None]
    tl.store(into + channel, mixed, mask=inside)

    # Where threads outnumber channels several have one: every thread has read before one writes.
    if TAPS > 1:
        tl.debug_barrier()
    for entry in tl.static_range(TAPS - 1):
        tl.store(tail + entry * tail_tap_stride, past[entry + 1], mask=inside)


@lean
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _delta_state_kernel(
    prepared,
    states,
    slots,
    out,
    state_stride,
    live_slots,
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program ``(value head and columns of its state, row)``."""
    if DEPENDENT:
        gdc_launch_dependents()
    blocks: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    value_head = tl.program_id(0) // blocks
    row = tl.program_id(1).to(tl.int64)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    key_head = value_head // (VALUE_HEADS // KEY_HEADS)
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)

    # Nor are states, so that they are on their way while the kernel before computes.
    slot = tl.load(slots + row).to(tl.int64)
    live = slot < live_slots
    k_inside, v_inside = (k < KEY_DIM) & live, (v < VALUE_DIM) & live
    state_at = states + slot * state_stride + value_head * (KEY_DIM * VALUE_DIM)
    state_at = state_at + k[:, None] * VALUE_DIM + v[None, :]
    inside = k_inside[:, None] & v_inside[None, :]
    state = tl.load(state_at, mask=inside, other=0.0, eviction_policy="evict_first")

    if DEPENDENT:
        gdc_wait()
    made = prepared + row * (channels + 2 * VALUE_HEADS)
    query = tl.load(made + key_head * KEY_DIM + k, mask=k_inside, other=0.0)
    key = tl.load(made + KEY_HEADS * KEY_DIM + key_head * KEY_DIM + k, mask=k_inside, other=0.0)
    values = made + 2 * KEY_HEADS * KEY_DIM + value_head * VALUE_DIM
    value = tl.load(values + v, mask=v_inside, other=0.0)
    decay = tl.load(made + channels + value_head, mask=live, other=0.0)
    beta = tl.load(made + channels + VALUE_HEADS + value_head, mask=live, other=0.0)

    alignment = tl.sum(query * key, 0)
    predicted = tl.sum(state * key[:, None], 0) * decay
    read = tl.sum(state * query[:, None], 0) * decay
    change = (value - predicted) * beta
    state = state * decay + key[:, None] * change[None, :]
    tl.store(state_at, state, mask=inside, eviction_policy="evict_first")
    mixed = (read + alignment * change) * scale
    out_at = out + row * (VALUE_HEADS * VALUE_DIM) + value_head * VALUE_DIM + v
    tl.store(out_at, mixed.to(out.dtype.element_ty), mask=v < VALUE_DIM)


def delta_decode(
    projected: Tensor,
    recurrent: RecurrentGeometry,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    states: Tensor,
    tails: Tensor,
    slots: Tensor,
    live_slots: int,
    out: Tensor,
    *,
    dependent: bool | None = None,
    blocks: StateBlocks = SERVED_BLOCKS,
) -> Tensor:
    """Take one token of each row through convolution, delta rule, norm and output gate.

    Rounds where `trivet.ops` rounds: `causal_conv_decode`, `decay_and_beta`, `gated_delta_decode`, `gated_rms_norm`.
    Not a bit of a row depends on the others, nor on how many there are.

    Args:
        projected: ``[rows, elements]``: queries, keys and values before the convolution, output gates, rates (beta
            before its sigmoid) and decays (a); the last dimension contiguous.
        recurrent: heads, widths and taps, of which `decode_serves` holds.
        conv_weight: ``[channels, taps]``, contiguous.
        a_log, dt_bias: ``[value_heads]``.
        norm_weight, norm_eps: of the norm over a value head, not zero-centred.
        states: ``[slots, value_heads, key_dim, value_dim]``, float32, a slot's contiguous. Changed in place.
        tails: ``[slots, channels, taps - 1]``, any strides. Changed in place.
        slots: int64 ``[rows]``, different from each other below `live_slots`.
        live_slots: slots from this one on are those of padding rows, which change nothing and whose output is zeros.
        out: ``[rows, value_elements]``, contiguous; the output.
        dependent: start while the kernel before drains, and load the state meanwhile; None: as the device's table says.
        blocks: how the state is divided among programs.

    Returns:
        `out`.
    """
    if dependent is None:
        dependent = dependent_launch(projected.get_device())
    rows, heads, taps = projected.shape[0], recurrent.value_heads, recurrent.conv_kernel
    widths = (recurrent.key_heads, heads, recurrent.key_dim, recurrent.value_dim)
    block_k, block_v = triton.next_power_of_2(recurrent.key_dim), triton.next_power_of_2(recurrent.value_dim)
    # Queries and keys of unit length, values, decays and rates.
    prepared = torch.empty((rows, recurrent.conv_channels + 2 * heads), dtype=torch.float32, device=projected.device)
    packed = (taps, conv_weight.element_size()) == PACKED and conv_weight.data_ptr() % PACKED_BYTES == 0
    _delta_prepare_kernel[(triton.cdiv(2 * recurrent.key_heads + heads, PREPARED_HEADS), rows)](
        projected, conv_weight, a_log, dt_bias, tails, slots, prepared,
        projected.stride(0), tails.stride(0), tails.stride(1), tails.stride(2), live_slots,
        *widths, taps, PREPARED_HEADS, max(block_k, block_v), UNIT_LENGTH_EPS,
        packed, dependent, num_warps=PREPARED_HEADS, launch_pdl=dependent,
    )  # fmt: skip
    columns = min(blocks.columns, block_v)
    warps = min(blocks.warps, max(1, block_k * columns // LEAST_ELEMENTS_OF_A_WARP))
    _delta_state_kernel[(heads * triton.cdiv(recurrent.value_dim, columns), rows)](
        prepared, states, slots, out, states.stride(0), live_slots, recurrent.key_dim**-0.5,
        *widths, block_k, columns, dependent, num_warps=warps, launch_pdl=dependent,
    )  # fmt: skip
    first_gate = recurrent.conv_channels
    gate = projected[:, first_gate : first_gate + recurrent.value_elements].unflatten(1, (heads, -1))
    mixed = out.unflatten(1, (heads, -1))
    gated_rms_norm(
        mixed, gate, norm_weight, norm_eps,
        out=mixed, slots=slots, live_slots=live_slots, dependent=dependent,
    )  # fmt: skip
    return out
