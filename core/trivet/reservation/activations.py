"""A planned bound on the temporaries of the worst step, from the capacity alone.

The start-up profile runs that step and fails if it measures more. The terms follow the shared layers: what one
layer keeps alive at once on top of the residual stream, plus the attention path's scratch, plus logits and sampling.
"""

from __future__ import annotations

import math

from trivet import checked
from trivet.capacity import RuntimeCapacity
from trivet.dtypes import item_bytes
from trivet.geometry import AttentionGeometry, LayerGeometry, RecurrentGeometry

FLOAT32_BYTES = 4
DELTA_CHUNK_TOKENS = 32
"""Chunk of the gated delta rule: its intra-chunk products are this wide."""


def activation_bytes(capacity: RuntimeCapacity, attention_scratch_bytes: int, sampler_scratch_bytes: int) -> int:
    """Bound on the temporaries of one step, in bytes.

    Args:
        attention_scratch_bytes: the largest scratch of the decode paths that serve.
        sampler_scratch_bytes: what sampling or scoring holds beside the logits.
    """
    width = item_bytes(capacity.dtype)
    geometry, tokens = capacity.geometry, capacity.step_tokens
    stream = tokens * geometry.hidden_size * (4 * width + 3 * FLOAT32_BYTES)
    mlp = tokens * geometry.intermediate_size * (5 * width)
    layers = {layer: _layer_bytes(layer, capacity, width) for layer in set(geometry.layers)}
    attends = any(isinstance(layer, AttentionGeometry) for layer in layers)
    widest = max(max(layers.values()) + (attention_scratch_bytes if attends else 0), mlp)
    return checked.sum_bytes("activations", (stream, widest, _logits_bytes(capacity, width), sampler_scratch_bytes))


def _layer_bytes(layer: LayerGeometry, capacity: RuntimeCapacity, width: int) -> int:
    tokens = capacity.step_tokens
    if isinstance(layer, AttentionGeometry):
        # projections (with an output gate), normalised and rotated queries and keys, and their float32 forms
        queries = layer.query_elements * (6 * width + 3 * FLOAT32_BYTES)
        keys_and_values = layer.kv_elements * (6 * width + 3 * FLOAT32_BYTES)
        return tokens * (queries + keys_and_values)
    return _recurrent_bytes(layer, capacity, width)


def _recurrent_bytes(layer: RecurrentGeometry, capacity: RuntimeCapacity, width: int) -> int:
    tokens, rows = capacity.step_tokens, capacity.step_rows
    # rows are padded to whole chunks: at most one unfinished chunk a row
    padded = tokens + min(rows, tokens) * DELTA_CHUNK_TOKENS
    projections = tokens * (layer.conv_channels + layer.value_elements) * (6 * width + 2 * FLOAT32_BYTES)
    widened = padded * layer.value_heads * (6 * layer.key_dim + 6 * layer.value_dim) * FLOAT32_BYTES
    products = padded * layer.value_heads * DELTA_CHUNK_TOKENS * 6 * FLOAT32_BYTES
    states = 4 * rows * math.prod(layer.state_shape) * FLOAT32_BYTES + 4 * rows * math.prod(layer.tail_shape) * width
    return projections + widened + products + states


def _logits_bytes(capacity: RuntimeCapacity, width: int) -> int:
    # logits in the served dtype, their float32 form, and one penalised copy
    return capacity.logit_rows * capacity.geometry.vocab_size * (width + 2 * FLOAT32_BYTES)
