"""A planned bound on the temporaries of the worst step, from the capacity alone.

The start-up profile runs that step and fails if either of its parts measures more. The terms follow the shared layers:
the residual stream and the attention paths' scratch, and on top of it in the forward part what one layer keeps alive at
once, and in the sampling part the logits with what sampling takes. The larger part is what is reserved. On a CUDA
device the allocator rounds up what it takes from the driver.
"""

from __future__ import annotations

from attrs import frozen

from trivet import checked
from trivet.capacity import RuntimeCapacity
from trivet.capacity.fused import fused_kernels_missing
from trivet.dtypes import FLOAT32_BYTES, item_bytes
from trivet.geometry import AttentionGeometry, LayerGeometry
from trivet.reservation.recurrent import INDEX_BYTES, fused_recurrent_bytes, recurrent_bytes

ROUNDING_SHARE = 8
"""An eighth of the temporaries, on a CUDA device: segments of the allocator that they do not fill."""


@frozen
class TokenCopies:
    """How many copies of a token's values the shared layers keep alive at once.

    Attributes:
        stream, stream_float32: of the residual stream, in the served dtype and in float32.
        mlp: of the MLP's intermediate values.
        heads, heads_float32: of query, key and value heads.
    """

    stream: int
    stream_float32: int
    mlp: int
    heads: int
    heads_float32: int


OF_OPERATIONS = TokenCopies(stream=4, stream_float32=3, mlp=5, heads=6, heads_float32=3)
"""One operation at a time: norms, rotations and activations each leave a result, and some a float32 form."""

OF_FUSED_KERNELS = TokenCopies(stream=2, stream_float32=0, mlp=3, heads=5, heads_float32=0)
"""The stream and its norm; gate and up, and their product; the projection, rotated queries, output gate and output."""


def token_copies(capacity: RuntimeCapacity) -> TokenCopies:
    """What the layers keep alive, by the kernels that are going to serve."""
    return OF_OPERATIONS if fused_kernels_missing(capacity.device, capacity.dtype) else OF_FUSED_KERNELS


@frozen
class StepBounds:
    """Bounds on the temporaries of one step, in bytes, by its parts, which come one after the other.

    Attributes:
        layers_bytes: while plans are updated and layers compute, without what attention takes.
        attention_bytes: what attention takes beside its results.
        forward_bytes: both together.
        sampling_bytes: from then on: logits, and sampling or scoring.
    """

    layers_bytes: int
    attention_bytes: int
    forward_bytes: int
    sampling_bytes: int


def step_bounds(
    capacity: RuntimeCapacity, attention_scratch_bytes: int, sampler_scratch_bytes: int, grain_tokens: int = 1
) -> StepBounds:
    """Bounds on the temporaries of one step, by its parts. Arguments as in `activation_bytes`."""
    held, widest = _layers_bytes(capacity, grain_tokens)
    logits = _logits_bytes(capacity) + sampler_scratch_bytes
    on_cuda = capacity.device.kind == "cuda"

    def bound(*terms: int) -> int:
        total = checked.sum_bytes("activations", terms)
        return total + total // ROUNDING_SHARE if on_cuda else total

    return StepBounds(
        layers_bytes=bound(held, widest),
        attention_bytes=bound(attention_scratch_bytes),
        forward_bytes=bound(held, widest, attention_scratch_bytes),
        sampling_bytes=bound(held, logits, attention_scratch_bytes),
    )


def activation_bytes(
    capacity: RuntimeCapacity, attention_scratch_bytes: int, sampler_scratch_bytes: int, grain_tokens: int = 1
) -> int:
    """Bound on the temporaries of one step, in bytes: of the part that takes more.

    Args:
        attention_scratch_bytes: the scratch of all decode paths that serve. Each may keep some of it from one layer to
            the next.
        sampler_scratch_bytes: what sampling or scoring holds beside the logits.
        grain_tokens: at whose multiples the prefix cache keeps recurrent states.
    """
    bounds = step_bounds(capacity, attention_scratch_bytes, sampler_scratch_bytes, grain_tokens)
    return max(bounds.forward_bytes, bounds.sampling_bytes)


def forward_bytes(capacity: RuntimeCapacity, attention_scratch_bytes: int, *, decode: bool = False) -> int:
    """The same without logits and sampling: bound on the temporaries of the layers.

    Args:
        decode: whether every row of the step is a decode row.
    """
    return checked.sum_bytes("activations", (*_layers_bytes(capacity, decode=decode), attention_scratch_bytes))


def _layers_bytes(capacity: RuntimeCapacity, grain_tokens: int = 1, *, decode: bool = False) -> tuple[int, int]:
    """What is held from layer to layer, and what the layer that takes most takes on top of it."""
    width, copies = item_bytes(capacity.dtype), token_copies(capacity)
    geometry, tokens = capacity.geometry, capacity.step_tokens
    stream = tokens * geometry.hidden_size * (copies.stream * width + copies.stream_float32 * FLOAT32_BYTES)
    rotations = sum(2 * tokens * plan.attention.rope.rotary_dim * width for plan in capacity.plans)
    mlp = tokens * geometry.intermediate_size * copies.mlp * width
    indices = (tokens + 2 * capacity.step_rows) * INDEX_BYTES  # token ids, and slots
    layers = (_layer_bytes(layer, capacity, width, copies, grain_tokens, decode) for layer in set(geometry.layers))
    widest = max(layers)
    if capacity.fused_recurrence:
        # torch's allocator does not put together what a recurrent layer leaves: an MLP's few larger blocks are new.
        widest += mlp
    return stream + rotations + indices, max(mlp, widest)


def _layer_bytes(
    layer: LayerGeometry, capacity: RuntimeCapacity, width: int, copies: TokenCopies, grain_tokens: int, decode: bool
) -> int:
    tokens, rows = capacity.step_tokens, capacity.step_rows
    if isinstance(layer, AttentionGeometry):
        # projections (with an output gate), normalised and rotated queries and keys, and their float32 forms
        each = copies.heads * width + copies.heads_float32 * FLOAT32_BYTES
        return tokens * (layer.query_elements + layer.kv_elements) * each
    if capacity.fused_recurrence:
        return fused_recurrent_bytes(layer, tokens, rows, 0 if decode else rows, width, grain_tokens)
    return recurrent_bytes(layer, tokens, rows, min(tokens, capacity.limits.max_context), width)


def _logits_bytes(capacity: RuntimeCapacity) -> int:
    # logits in the served dtype, their float32 form, and one penalised copy
    each = item_bytes(capacity.dtype) + 2 * FLOAT32_BYTES
    return capacity.logit_rows * capacity.geometry.vocab_size * each
