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
    out = torch.empty_like(query)
    for block in blocks:
        result = scaled_dot_product_attention(
            _grouped_queries(query, block, kv_heads),
            _gathered(keys, block, kv_heads),
            _gathered(values, block, kv_heads),
            attn_mask=block.bias,
        )
        tokens, rows = _valid_rows(_by_token(result, block, query), block)
        if tokens.shape[0] == out.shape[0]:
            return rows  # one block holds the whole step, in token order
        out.index_copy_(0, tokens, rows)
    return out


def _attend_split(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kv_heads: int, blocks: Iterable[BlockIndex]
) -> torch.Tensor:
    """Running softmax over KV tiles (Milakov and Gimelshein 2018, arXiv 1805.02867), merged per token and head."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    tokens, heads, head_dim = query.shape
    weighted = torch.zeros(tokens, heads, head_dim, dtype=wide, device=query.device)
    total = torch.zeros(tokens, heads, 1, dtype=wide, device=query.device)
    peak = torch.full((tokens, heads, 1), torch.finfo(wide).min, dtype=wide, device=query.device)
    for block in blocks:
        grouped = _grouped_queries(query, block, kv_heads).to(wide)
        scores = grouped @ _gathered(keys, block, kv_heads).to(wide).transpose(-1, -2)
        scores = scores.mul_(head_dim**-0.5).add_(block.bias)
        # a query that sees nothing of this tile keeps a finite peak, and weights of exactly zero
        tile_peak = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(wide).min)
        weights = scores.sub_(tile_peak).exp_()
        tile_total = weights.sum(-1, keepdim=True)
        tile_weighted = weights @ _gathered(values, block, kv_heads).to(wide)
        rows, tile_weighted = _valid_rows(_by_token(tile_weighted, block, query), block)
        tile_peak = _valid_rows(_by_token(tile_peak, block, query), block)[1]
        tile_total = _valid_rows(_by_token(tile_total, block, query), block)[1]
        old_peak = peak.index_select(0, rows)
        new_peak = torch.maximum(old_peak, tile_peak)
        keep, gain = (old_peak - new_peak).exp_(), (tile_peak - new_peak).exp_()
        peak.index_copy_(0, rows, new_peak)
        total.index_copy_(0, rows, total.index_select(0, rows) * keep + tile_total * gain)
        weighted.index_copy_(0, rows, weighted.index_select(0, rows) * keep + tile_weighted * gain)
    return (weighted / total).to(query.dtype)


def _grouped_queries(query: torch.Tensor, block: BlockIndex, kv_heads: int) -> torch.Tensor:
    """Queries as ``[items, kv_heads, group * height, head_dim]``: a group shares its KV head's keys."""
    items, height = block.tokens.shape
    _, heads, head_dim = query.shape
    gathered = query.index_select(0, block.tokens.view(-1))
    if height == 1:
        return gathered.view(items, kv_heads, heads // kv_heads, head_dim)
    by_head = gathered.view(items, height, kv_heads, heads // kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    return by_head.reshape(items, kv_heads, heads // kv_heads * height, head_dim)


def _gathered(cache: torch.Tensor, block: BlockIndex, kv_heads: int) -> torch.Tensor:
    """Keys or values of a block as ``[items, kv_heads, extent, head_dim]``."""
    items, extent = block.bias.shape[0], block.bias.shape[-1]
    return cache.index_select(0, block.slots).view(items, extent, kv_heads, -1).transpose(1, 2)


def _by_token(result: torch.Tensor, block: BlockIndex, query: torch.Tensor) -> torch.Tensor:
    """``[items, kv_heads, group * height, width]`` back to ``[items * height, query_heads, width]``."""
    items, height = block.tokens.shape
    heads, width = query.shape[1], result.shape[-1]
    if height == 1:
        return result.reshape(items, heads, width)
    kv_heads = result.shape[1]
    by_height = result.view(items, kv_heads, heads // kv_heads, height, width).permute(0, 3, 1, 2, 4)
    return by_height.reshape(items * height, heads, width)


def _valid_rows(rows: torch.Tensor, block: BlockIndex) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a block without the repeats that fill up short items, and their rows."""
    tokens = block.tokens.view(-1)
    if block.valid is None:
        return tokens, rows
    kept = block.valid.view(-1)
    return tokens[kept], rows[kept]
