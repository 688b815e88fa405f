"""Attention over gathered blocks in torch: group-agnostic, vectorised over items and heads, float32 accumulation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import scaled_dot_product_attention

from trivet.attention.reference.blocks import BlockIndex


def attend_blocks(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, blocks: Iterable[BlockIndex], one_kv_tile: bool
) -> torch.Tensor:
    """Causal attention of ``query [tokens, query_heads, head_dim]``.

    Args:
        keys, values: one layer's cache, ``[pages, page_size, kv_heads, head_dim]``.
        blocks: where each block's queries and keys lie.
        one_kv_tile: whether no context is longer than one KV tile; partial results then need no merging.
    """
    kv_heads, head_dim = keys.shape[-2:]
    flat_keys, flat_values = keys.view(-1, kv_heads * head_dim), values.view(-1, kv_heads * head_dim)
    if one_kv_tile:
        return _attend_whole(query, flat_keys, flat_values, kv_heads, blocks)
    return _attend_split(query, flat_keys, flat_values, kv_heads, blocks)


def _attend_whole(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kv_heads: int, blocks: Iterable[BlockIndex]
) -> torch.Tensor:
    out: torch.Tensor | None = None
    for index in blocks:
        result = scaled_dot_product_attention(
            _grouped_queries(query, index, kv_heads),
            _gathered(keys, index, kv_heads),
            _gathered(values, index, kv_heads),
            attn_mask=index.bias,
        )
        rows = _by_token(result, index, query)
        if index.targets is None:
            return rows  # one block holds the whole step, in token order
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        out.index_copy_(0, index.targets, rows)
    return torch.empty_like(query) if out is None else out


def _attend_split(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kv_heads: int, blocks: Iterable[BlockIndex]
) -> torch.Tensor:
    """Running softmax over KV tiles (Milakov and Gimelshein 2018, arXiv 1805.02867), merged per token and head."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    tokens, heads, head_dim = query.shape
    weighted = torch.zeros(tokens, heads, head_dim, dtype=wide, device=query.device)
    total = torch.zeros(tokens, heads, 1, dtype=wide, device=query.device)
    peak = torch.full((tokens, heads, 1), torch.finfo(wide).min, dtype=wide, device=query.device)
    for index in blocks:
        grouped = _grouped_queries(query, index, kv_heads).to(wide)
        scores = grouped @ _gathered(keys, index, kv_heads).to(wide).transpose(-1, -2)
        scores = scores.mul_(head_dim**-0.5)
        if index.bias is not None:
            scores = scores.add_(index.bias)
        # a query that sees nothing of this tile keeps a finite peak, and weights of exactly zero
        tile_peak = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(wide).min)
        weights = scores.sub_(tile_peak).exp_()
        tile_total = _by_token(weights.sum(-1, keepdim=True), index, query)
        tile_weighted = _by_token(weights @ _gathered(values, index, kv_heads).to(wide), index, query)
        tile_peak = _by_token(tile_peak, index, query)
        rows = index.targets
        old_peak, old_total, old_weighted = (x if rows is None else x[rows] for x in (peak, total, weighted))
        new_peak = torch.maximum(old_peak, tile_peak)
        keep, gain = (old_peak - new_peak).exp_(), (tile_peak - new_peak).exp_()
        merged = (new_peak, old_total * keep + tile_total * gain, old_weighted * keep + tile_weighted * gain)
        for kept, new in zip((peak, total, weighted), merged, strict=True):
            if rows is None:
                kept.copy_(new)
            else:
                kept.index_copy_(0, rows, new)
    return (weighted / total).to(query.dtype)


def _grouped_queries(query: torch.Tensor, index: BlockIndex, kv_heads: int) -> torch.Tensor:
    """Queries as ``[items, kv_heads, group * height, head_dim]``: a group shares its KV head's keys."""
    items, height = index.block.items, index.block.height
    _, heads, head_dim = query.shape
    rows = query if index.tokens is None else query.index_select(0, index.tokens)
    if height == 1:
        return rows.view(items, kv_heads, heads // kv_heads, head_dim)
    by_head = rows.view(items, height, kv_heads, heads // kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    return by_head.reshape(items, kv_heads, heads // kv_heads * height, head_dim)


def _gathered(cache: torch.Tensor, index: BlockIndex, kv_heads: int) -> torch.Tensor:
    """Keys or values of a block as ``[items, kv_heads, extent, head_dim]``."""
    items, extent = index.block.items, index.block.extent
    return cache.index_select(0, index.slots).view(items, extent, kv_heads, -1).transpose(1, 2)


def _by_token(result: torch.Tensor, index: BlockIndex, query: torch.Tensor) -> torch.Tensor:
    """``[items, kv_heads, group * height, width]`` back to ``[tokens, query_heads, width]``, without repeats."""
    items, height = index.block.items, index.block.height
    heads, width = query.shape[1], result.shape[-1]
    if height == 1:
        return result.reshape(items, heads, width)
    kv_heads = result.shape[1]
    by_height = result.view(items, kv_heads, heads // kv_heads, height, width).permute(0, 3, 1, 2, 4)
    rows = by_height.reshape(items * height, heads, width)
    return rows if index.kept is None else rows.index_select(0, index.kept)
