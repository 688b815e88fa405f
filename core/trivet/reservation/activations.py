"""A planned bound on the temporaries of the worst step, from the capacity alone.

The start-up profile runs that step and fails if it measures more. The terms follow the shared layers: what one
layer keeps alive at once on top of the residual stream, plus the attention paths' scratch, plus logits and sampling.
"""

from __future__ import annotations

from trivet import checked
from trivet.capacity import RuntimeCapacity
from trivet.dtypes import item_bytes
from trivet.geometry import AttentionGeometry, LayerGeometry
from trivet.reservation.recurrent import FLOAT32_BYTES, recurrent_bytes


def activation_bytes(capacity: RuntimeCapacity, attention_scratch_bytes: int, sampler_scratch_bytes: int) -> int:
    """Bound on the temporaries of one step, in bytes.

    Args:
        attention_scratch_bytes: the scratch of all decode paths that serve. Each may keep some of it from one layer to
            the next.
        sampler_scratch_bytes: what sampling or scoring holds beside the logits.
    """
    width = item_bytes(capacity.dtype)
    geometry, tokens = capacity.geometry, capacity.step_tokens
    stream = tokens * geometry.hidden_size * (4 * width + 3 * FLOAT32_BYTES)
    rotations = sum(2 * tokens * plan.attention.rope.rotary_dim * width for plan in capacity.plans)
    mlp = tokens * geometry.intermediate_size * (5 * width)
    widest = max(mlp, *(_layer_bytes(layer, capacity, width) for layer in set(geometry.layers)))
    logits = _logits_bytes(capacity, width)
    terms = (stream, rotations, widest, attention_scratch_bytes, logits, sampler_scratch_bytes)
    return checked.sum_bytes("activations", terms)


def _layer_bytes(layer: LayerGeometry, capacity: RuntimeCapacity, width: int) -> int:
    tokens = capacity.step_tokens
    if isinstance(layer, AttentionGeometry):
        # projections (with an output gate), normalised and rotated queries and keys, and their float32 forms
        queries = layer.query_elements * (6 * width + 3 * FLOAT32_BYTES)
        keys_and_values = layer.kv_elements * (6 * width + 3 * FLOAT32_BYTES)
        return tokens * (queries + keys_and_values)
    longest_row_tokens = min(tokens, capacity.limits.max_context)
    return recurrent_bytes(layer, tokens, capacity.step_rows, longest_row_tokens, width)


def _logits_bytes(capacity: RuntimeCapacity, width: int) -> int:
    # logits in the served dtype, their float32 form, and one penalised copy
    return capacity.logit_rows * capacity.geometry.vocab_size * (width + 2 * FLOAT32_BYTES)
