"""The paged KV cache: one key and one value buffer per full-attention layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivet.geometry import AttentionGeometry, ModelGeometry
from trivet.layout import BufferLayout, Buffers, BufferSpec

if TYPE_CHECKING:
    import torch

PADDING_PAGES = 1
"""Pages on top of the pool that padding rows write to; never listed by a live row."""


def kv_layout(geometry: ModelGeometry, page_size: int, pages: int, dtype: str) -> BufferLayout:
    """Buffers of a cache with `pages` pages and the padding page behind them.

    Each is ``[pages + 1, page_size, kv_heads, head_dim]`` in the served dtype, one for keys and one for values per
    full-attention layer.
    """
    specs = []
    for index in geometry.attention_layers:
        layer = geometry.layers[index]
        assert isinstance(layer, AttentionGeometry)
        elements = (pages + PADDING_PAGES) * page_size * layer.kv_elements
        specs += [BufferSpec(f"keys.{index}", elements, dtype), BufferSpec(f"values.{index}", elements, dtype)]
    return BufferLayout("KV pages", tuple(specs))


class KvCache:
    """Views on the pages of each layer."""

    def __init__(self, geometry: ModelGeometry, page_size: int, buffers: Buffers) -> None:
        self.buffers = buffers
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for index in geometry.attention_layers:
            layer = geometry.layers[index]
            assert isinstance(layer, AttentionGeometry)
            shape = (-1, page_size, layer.kv_heads, layer.head_dim)
            self._layers[index] = (buffers[f"keys.{index}"].view(shape), buffers[f"values.{index}"].view(shape))

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer `index`, each ``[pages + 1, page_size, kv_heads, head_dim]``."""
        return self._layers[index]

    def close(self) -> None:
        """Release the pages. Idempotent."""
        self._layers = {}
        self.buffers.close()
