# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""From the projection of an attention layer to rotated queries and a paged cache, in one kernel."""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trivet.launch import lean
from trivet.ops.fused.device import dependent_launch

BLOCK = 1024
"""Elements of a program: some heads of one token."""


@triton.jit
def _normed(values, scale, inverse, dtype: tl.constexpr, ZERO_CENTRED: tl.constexpr):
    """Values of the served dtype over their root mean square, rounded where `trivet.ops.norm` rounds."""
    normed = values * inverse
    if ZERO_CENTRED:
        normed += normed * scale
    else:
        normed = normed.to(dtype).to(tl.float32) * scale
    return normed.to(dtype).to(tl.float32)


@triton.jit
def _normed_and_rotated(
    at,
    inside,
    weight,
    table_row,
    eps,
    dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORMED: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
):
    """Heads ``[heads, BLOCK_D]`` that begin at ``at [heads, 1]``, normed and rotated, in float32."""
    half: tl.constexpr = ROTARY_DIM // 2
    d = tl.arange(0, BLOCK_D)
    within = d < HEAD_DIM
    turns = d < ROTARY_DIM
    partner = tl.where(turns, tl.where(d < half, d + half, d - half), 0)
    values = tl.load(at + d[None, :], mask=inside & within[None, :], other=0.0).to(tl.float32)
    others = tl.load(at + partner[None, :], mask=inside & turns[None, :], other=0.0).to(tl.float32)
    if NORMED:
        inverse = tl.rsqrt(tl.sum(values * values, 1) / HEAD_DIM + eps)[:, None]
        scale = tl.load(weight + d, mask=within, other=0.0).to(tl.float32)[None, :]
        partner_scale = tl.load(weight + partner, mask=turns, other=0.0).to(tl.float32)[None, :]
        values = _normed(values, scale, inverse, dtype, ZERO_CENTRED)
        others = _normed(others, partner_scale, inverse, dtype, ZERO_CENTRED)
    angle = tl.where(d < half, d, d - half)
    # Cosines and sines are rounded to the served dtype, as transformers multiplies by them.
    cosine = tl.load(table_row + angle, mask=turns, other=1.0).to(dtype).to(tl.float32)[None, :]
    sine = tl.load(table_row + half + angle, mask=turns, other=0.0).to(dtype).to(tl.float32)
    sine = tl.where(d < half, -sine, sine)[None, :]
    rotated = (values * cosine).to(dtype).to(tl.float32) + others * sine
    return tl.where(turns[None, :], rotated, values)


@lean
@triton.jit
def _norm_rotate_append_kernel(
    projected,
    query,
    keys,
    values,
    query_weight,
    key_weight,
    table,
    batch_indices,
    positions,
    page_indptr,
    page_indices,
    projected_stride,
    key_offset,
    page_size,
    page_stride,
    slot_stride,
    eps,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    QUERY_HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORMED: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program ``(token, group)``: `HEADS` heads of a token. Groups of query heads first, then of key, then of value."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    dtype: tl.constexpr = query.dtype.element_ty
    d = tl.arange(0, BLOCK_D)[None, :]
    row = projected + token * projected_stride
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions + token)
    table_row = table + tl.maximum(position, 0).to(tl.int64) * ROTARY_DIM
    if group < query_groups:
        head = (group * HEADS + tl.arange(0, HEADS))[:, None]
        inside = head < QUERY_HEADS
        turned = _normed_and_rotated(
            row + head * QUERY_HEAD_STRIDE, inside, query_weight, table_row, eps, dtype,
            HEAD_DIM, ROTARY_DIM, BLOCK_D, NORMED, ZERO_CENTRED,
        )  # fmt: skip
        place = query + token * (QUERY_HEADS * HEAD_DIM) + head * HEAD_DIM + d
        tl.store(place, turned.to(dtype), mask=inside & (d < HEAD_DIM))
    else:
        # A token before its row's start is written nowhere.
        first = tl.load(page_indptr + tl.load(batch_indices + token))
        page = tl.load(page_indices + first + position // page_size, mask=position >= 0, other=0)
        slot = page.to(tl.int64) * page_stride + (position % page_size).to(tl.int64) * slot_stride
        if group < query_groups + kv_groups:
            head = ((group - query_groups) * HEADS + tl.arange(0, HEADS))[:, None]
            inside = (head < KV_HEADS) & (position >= 0)
            turned = _normed_and_rotated(
                row + key_offset + head * HEAD_DIM, inside, key_weight, table_row, eps, dtype,
                HEAD_DIM, ROTARY_DIM, BLOCK_D, NORMED, ZERO_CENTRED,
            )  # fmt: skip
            tl.store(keys + slot + head * HEAD_DIM + d, turned.to(dtype), mask=inside & (d < HEAD_DIM))
        else:
            head = ((group - query_groups - kv_groups) * HEADS + tl.arange(0, HEADS))[:, None]
            copied = (head < KV_HEADS) & (position >= 0) & (d < HEAD_DIM)
            value = tl.load(row + key_offset + (KV_HEADS + head) * HEAD_DIM + d, mask=copied, other=0.0)
            tl.store(values + slot + head * HEAD_DIM + d, value, mask=copied)


@cache
def _programs(query_heads: int, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Programs of a token, heads of a program, and elements that it takes of each."""
    block_d = triton.next_power_of_2(head_dim)
    heads = max(1, min(BLOCK // block_d, triton.next_power_of_2(kv_heads)))
    return -(-query_heads // heads) + 2 * -(-kv_heads // heads), heads, block_d


def norm_rotate_append(
    projected: Tensor,
    query_heads: int,
    norms: tuple[Tensor, Tensor, float, bool] | None,
    table: Tensor,
    rotary_dim: int,
    places: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    *,
    gated: bool = False,
) -> Tensor:
    """Norm and rotate the step's query and key heads, and write keys and values to their pages.

    Rounds where `trivet.ops.norm.query_key_rms_norm` and `trivet.ops.rotary.apply_rotary_` round.

    Args:
        projected: ``[tokens, elements]``, query heads, key heads, value heads; the last dimension contiguous.
        query_heads: how many query heads there are; key and value heads are as many as the cache has.
        norms: weight of the query norm, of the key norm (each ``[head_dim]``, contiguous), epsilon, and whether they
            are zero-centred; None for no norms.
        table: float32, as `trivet.ops.rotary.fill_rotary_table` fills it.
        rotary_dim: leading entries of a head that are rotated, and the length of a row of `table`.
        places: int32 ``batch_indices [tokens]``, ``positions [tokens]``, ``page_indptr`` and ``page_indices``, as an
            owner's ``token_places`` gives them (`trivet.attention.places`).
        keys, values: one layer's cache, ``[pages, page_size, kv_heads, head_dim]``, equal in strides, each slot's heads
            contiguous.
        gated: each query head of `projected` is followed by a gate of the same size, which is left alone.

    Returns:
        The queries, a new contiguous tensor ``[tokens, query_heads, head_dim]``.
    """
    tokens = projected.shape[0]
    _, page_size, kv_heads, head_dim = keys.shape
    query = projected.new_empty((tokens, query_heads, head_dim))
    if tokens == 0:
        return query
    query_weight, key_weight, eps, zero_centred = norms or (projected, projected, 0.0, False)
    query_head_stride = 2 * head_dim if gated else head_dim
    groups, heads, block_d = _programs(query_heads, kv_heads, head_dim)
    page_stride, slot_stride, _, _ = keys.stride()
    dependent = dependent_launch(projected.get_device())
    _norm_rotate_append_kernel[(tokens, groups)](
        projected, query, keys, values, query_weight, key_weight, table, *places,
        projected.stride(0), query_heads * query_head_stride, page_size, page_stride, slot_stride, eps,
        query_heads, kv_heads, head_dim, rotary_dim, query_head_stride, heads, block_d,
        norms is not None, zero_centred, dependent, num_warps=4, launch_pdl=dependent,
    )  # fmt: skip
    return query
