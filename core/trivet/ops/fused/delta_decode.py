# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""One token of each row through a Gated DeltaNet layer, between its two projections.

Few rows take one kernel, and more of them those of `trivet.ops.fused.delta_split`. A program of the one kernel has one
value head of one row, and holds that head's whole state in registers: the convolution of its channels, the delta rule,
the norm over the head and the output gate need nothing of another program. What they share is the convolution's tail of
their key head, which all of them read and one must write: the last of them to have read it does, so that it is written
in place without a kernel of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trivet.geometry import RecurrentGeometry
from trivet.ops.fused.delta_split import SplitHeads, delta_decode_split
from trivet.ops.fused.device import device_table
from trivet.ops.fused.gates import log_decay, silu
from trivet.ops.gated_delta import UNIT_LENGTH_EPS

MOST_STATE_ELEMENTS = 128 * 128
"""Of one head, rounded up to powers of two: what a program of eight warps holds in registers."""


@frozen
class WholeHeads:
    """How the one kernel is launched: a program has a whole head.

    Attributes:
        warps: of a program.
        registers: at most of a thread; 128 lets a multiprocessor hold two programs of eight warps, one of which loads
            its state while the other computes. None: as many as are wanted.
    """

    warps: int = 8
    registers: int | None = 128


WHOLE_HEADS_ROWS = 2
"""Up to as many rows take the one kernel: so few are done before three kernels have been launched."""

SPLIT_HEADS = ((None, SplitHeads()),)
"""By the most rows that a shape serves, None for any."""


def decode_shape(rows: int) -> WholeHeads | SplitHeads:
    """How as many rows are served."""
    if rows <= WHOLE_HEADS_ROWS:
        return WholeHeads()
    return next(shape for most, shape in SPLIT_HEADS if most is None or rows <= most)


def decode_serves(recurrent: RecurrentGeometry) -> bool:
    """Whether the state of a head fits a program."""
    block_k, block_v = triton.next_power_of_2(recurrent.key_dim), triton.next_power_of_2(recurrent.value_dim)
    serves: bool = block_k * block_v <= MOST_STATE_ELEMENTS
    return serves


@triton.jit
def _past(tail, channel, inside, channel_stride, tap_stride, TAPS: tl.constexpr, BLOCK_T: tl.constexpr):
    """The entries of a tail under the convolution's taps, ``[BLOCK_T, channels]``; zeros under the newest tap."""
    tap = tl.arange(0, BLOCK_T)[:, None]
    at = tail + channel[None, :] * channel_stride + tap * tap_stride
    return tl.load(at, mask=inside[None, :] & (tap < TAPS - 1), other=0.0).to(tl.float32)


@triton.jit
def _taps(weight, channel, inside, TAPS: tl.constexpr, BLOCK_T: tl.constexpr):
    """The convolution's weights of some channels, ``[BLOCK_T, channels]``."""
    tap = tl.arange(0, BLOCK_T)[:, None]
    at = weight + channel[None, :] * TAPS + tap
    return tl.load(at, mask=inside[None, :] & (tap < TAPS), other=0.0).to(tl.float32)


@triton.jit
def _convolved(past, taps, x, channel, inside, dtype: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr):
    """``silu`` of the convolution at the newest input ``x``, rounded to `dtype`, in float32.

    Tiles, not vectors, keep the compiler from loading every channel in every thread that wants it later.
    """
    tap = tl.arange(0, BLOCK_T)[:, None]
    newest = tl.load(x + channel[None, :] + tap * 0, mask=inside[None, :] & (tap == TAPS - 1), other=0.0)
    total = tl.sum((past + newest.to(tl.float32)) * taps, 0)
    return silu(total).to(dtype).to(tl.float32)


@triton.jit
def shift_tail(tail, x, channel, inside, channel_stride, tap_stride, TAPS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Drop the oldest entry of a tail and append ``x [1, channels]``; ``channel`` is of that shape too."""
    entry = tl.arange(0, BLOCK_T)[:, None]
    at = tail + channel * channel_stride + entry * tap_stride
    kept = tl.load(at + tap_stride, mask=inside & (entry < TAPS - 2), other=0.0)
    newest = tl.load(x + channel + entry * 0, mask=inside & (entry == TAPS - 2), other=0.0)
    moved = tl.where(entry == TAPS - 2, newest, kept)
    # Every thread has read before one writes where another reads.
    tl.debug_barrier()
    tl.store(at, moved, mask=inside & (entry < TAPS - 1))


@triton.jit
def _delta_decode_kernel(
    projected,
    conv_weight,
    a_log,
    dt_bias,
    norm_weight,
    states,
    tails,
    slots,
    arrivals,
    out,
    projected_stride,
    state_stride,
    tail_stride,
    tail_channel_stride,
    tail_tap_stride,
    live_slots,
    norm_eps,
    scale,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LENGTH_EPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program ``(value head, row)``."""
    if DEPENDENT:
        gdc_launch_dependents()
    value_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    expansion: tl.constexpr = VALUE_HEADS // KEY_HEADS
    values_at: tl.constexpr = 2 * KEY_HEADS * KEY_DIM
    gates_at: tl.constexpr = values_at + VALUE_HEADS * VALUE_DIM
    rates_at: tl.constexpr = gates_at + VALUE_HEADS * VALUE_DIM
    dtype: tl.constexpr = out.dtype.element_ty
    key_head = value_head // expansion
    k, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k_inside, v_inside = k < KEY_DIM, v < VALUE_DIM

    # Neither slots, states, tails nor parameters are of the kernels that may still be at work: those of this step's
    # layer before, between which and the last step lie kernels that wait for all before them.
    slot = tl.load(slots + row).to(tl.int64)
    live = slot < live_slots
    state_at = states + slot * state_stride + value_head * (KEY_DIM * VALUE_DIM)
    state_at = state_at + k[:, None] * VALUE_DIM + v[None, :]
    inside = k_inside[:, None] & v_inside[None, :] & live
    state = tl.load(state_at, mask=inside, other=0.0, eviction_policy="evict_first")
    tail = tails + slot * tail_stride
    query_channel = key_head * KEY_DIM + k
    key_channel = KEY_HEADS * KEY_DIM + query_channel
    value_channel = values_at + value_head * VALUE_DIM + v
    query_past = _past(tail, query_channel, k_inside & live, tail_channel_stride, tail_tap_stride, TAPS, BLOCK_T)
    key_past = _past(tail, key_channel, k_inside & live, tail_channel_stride, tail_tap_stride, TAPS, BLOCK_T)
    value_past = _past(tail, value_channel, v_inside & live, tail_channel_stride, tail_tap_stride, TAPS, BLOCK_T)
    query_taps = _taps(conv_weight, query_channel, k_inside, TAPS, BLOCK_T)
    key_taps = _taps(conv_weight, key_channel, k_inside, TAPS, BLOCK_T)
    value_taps = _taps(conv_weight, value_channel, v_inside, TAPS, BLOCK_T)
    head_log, head_bias = tl.load(a_log + value_head).to(tl.float32), tl.load(dt_bias + value_head).to(tl.float32)
    norm = tl.load(norm_weight + v, mask=v_inside, other=0.0).to(tl.float32)

    if DEPENDENT:
        gdc_wait()
    x = projected + row * projected_stride
    out_at = out + row * (VALUE_HEADS * VALUE_DIM) + value_head * VALUE_DIM + v
    if live:
        rate = tl.load(x + rates_at + value_head).to(tl.float32)
        a = tl.load(x + rates_at + VALUE_HEADS + value_head).to(tl.float32)
        gate = tl.load(x + gates_at + value_head * VALUE_DIM + v, mask=v_inside, other=0.0).to(tl.float32)

        # Rounded where the torch operations round.
        query = _convolved(query_past, query_taps, x, query_channel, k_inside, dtype, TAPS, BLOCK_T)
        key = _convolved(key_past, key_taps, x, key_channel, k_inside, dtype, TAPS, BLOCK_T)
        value = _convolved(value_past, value_taps, x, value_channel, v_inside, dtype, TAPS, BLOCK_T)
        beta = (1.0 / (1.0 + tl.exp(-rate))).to(dtype).to(tl.float32)
        decay = tl.exp(log_decay(a, head_log, head_bias))
        query *= tl.rsqrt(tl.sum(query * query, 0) + LENGTH_EPS)
        key *= tl.rsqrt(tl.sum(key * key, 0) + LENGTH_EPS)
        alignment = tl.sum(query * key, 0)

        predicted = tl.sum(state * key[:, None], 0) * decay
        read = tl.sum(state * query[:, None], 0) * decay
        change = (value - predicted) * beta
        state = state * decay + key[:, None] * change[None, :]
        tl.store(state_at, state, mask=inside, eviction_policy="evict_first")
        mixed = ((read + alignment * change) * scale).to(dtype).to(tl.float32)

        mean_square = tl.sum(mixed * mixed, 0) / VALUE_DIM
        normed = (mixed * tl.rsqrt(mean_square + norm_eps)).to(dtype).to(tl.float32)
        normed = (normed * norm).to(dtype).to(tl.float32)
        tl.store(out_at, (silu(gate) * normed).to(dtype), mask=v_inside)

        if TAPS > 1:
            shift_tail(
                tail, x, value_channel[None, :], v_inside[None, :], tail_channel_stride, tail_tap_stride, TAPS, BLOCK_T
            )
            last = True
            if expansion > 1:
                # All threads have read the key head's tail before one of them announces it.
                tl.debug_barrier()
                counted = arrivals + slot * KEY_HEADS + key_head
                last = tl.atomic_add(counted, 1, sem="acq_rel", scope="gpu") == expansion - 1
            if last:
                for part in tl.static_range(2):
                    channel = (part * KEY_HEADS * KEY_DIM + query_channel)[None, :]
                    shift_tail(tail, x, channel, k_inside[None, :], tail_channel_stride, tail_tap_stride, TAPS, BLOCK_T)
                if expansion > 1:
                    tl.store(arrivals + slot * KEY_HEADS + key_head, 0)
    else:
        tl.store(out_at, tl.zeros([BLOCK_V], dtype), mask=v_inside)


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
    arrivals: Tensor,
    live_slots: int,
    out: Tensor,
    *,
    dependent: bool | None = None,
    shape: WholeHeads | SplitHeads | None = None,
) -> Tensor:
    """Take one token of each row through convolution, delta rule, norm and output gate.

    Rounds where `trivet.ops` rounds: `causal_conv_decode`, `decay_and_beta`, `gated_delta_decode`, `gated_rms_norm`.
    Nothing of a row depends on the others, and on how many there are only which kernels it takes.

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
        arrivals: int32 zeros ``[slots, key_heads]`` or more, which are zeros again afterwards. Two calls that may run
            at once must not share them.
        live_slots: slots from this one on are those of padding rows, which change nothing and whose output is zeros.
        out: ``[rows, value_elements]``, contiguous; the output.
        dependent: start while the kernel before drains, and load the state meanwhile; None: as the device's table says.
        shape: how the kernels are launched; None: as `decode_shape` says.

    Returns:
        `out`.
    """
    if dependent is None:
        dependent = device_table(projected.device).dependent_launch
    if shape is None:
        shape = decode_shape(projected.shape[0])
    if isinstance(shape, SplitHeads):
        return delta_decode_split(
            projected, recurrent, conv_weight, a_log, dt_bias, norm_weight, norm_eps, states, tails, slots,
            live_slots, out, dependent=dependent, shape=shape,
        )  # fmt: skip
    _delta_decode_kernel[(recurrent.value_heads, projected.shape[0])](
        projected, conv_weight, a_log, dt_bias, norm_weight, states, tails, slots, arrivals, out,
        projected.stride(0), states.stride(0), tails.stride(0), tails.stride(1), tails.stride(2), live_slots,
        norm_eps, recurrent.key_dim**-0.5,
        recurrent.key_heads, recurrent.value_heads, recurrent.key_dim, recurrent.value_dim, recurrent.conv_kernel,
        triton.next_power_of_2(recurrent.key_dim), triton.next_power_of_2(recurrent.value_dim),
        triton.next_power_of_2(recurrent.conv_kernel), UNIT_LENGTH_EPS,
        dependent, num_warps=shape.warps, maxnreg=shape.registers, launch_pdl=dependent,
    )  # fmt: skip
    return out


def arrival_counts(slots: int, key_heads: int, device: torch.device) -> Tensor:
    """What `delta_decode` counts in."""
    return torch.zeros((slots, key_heads), dtype=torch.int32, device=device)
