"""Rows of any lengths through a Gated DeltaNet layer, between its two projections: chunk by chunk.

What chunks do each for itself comes first (`trivet.ops.fused.delta_systems`); then `trivet.ops.fused.delta_scan` takes
the states from chunk to chunk, and reads the outputs beside that. Where chunks begin is worked out once per step, in
`trivet.ops.packed.ChunkTable`.
"""

from __future__ import annotations

from torch import Tensor

from trivet.capacity.fused import beyond_chunk_kernels
from trivet.geometry import RecurrentGeometry
from trivet.ops.fused.delta_inputs import DeltaInputs, delta_inputs
from trivet.ops.fused.delta_scan import ScanConfig, delta_scan
from trivet.ops.fused.delta_systems import delta_systems, delta_writes
from trivet.ops.fused.gated_norm import gated_rms_norm
from trivet.ops.packed import ChunkTable


def chunks_serve(recurrent: RecurrentGeometry) -> bool:
    """Whether the kernels take such a layer."""
    return beyond_chunk_kernels(recurrent) is None


def chunked_delta_rule(
    inputs: DeltaInputs,
    states: Tensor,
    slots: Tensor,
    table: ChunkTable,
    kept_states: Tensor | None = None,
    scan: ScanConfig | None = None,
) -> Tensor:
    """The delta rule over rows of any lengths, each from the state of its slot.

    Args:
        inputs: all contiguous.
        states, slots, table, kept_states: as `trivet.ops.fused.delta_scan.delta_scan` takes them.
        scan: how states are taken from chunk to chunk; None: as is fastest.

    Returns:
        ``[tokens, value_heads, value_dim]``, in the dtype of the values.
    """
    query, key, decay, beta = inputs.query, inputs.key, inputs.decay, inputs.beta
    weights, inverses = delta_systems(query, key, decay, beta, table)
    readers, written = delta_writes(key, inputs.value, decay, beta, inverses, table)
    delta_scan(query, key, weights, readers, written, decay, states, kept_states, slots, table, scan)
    return written


def delta_chunks(
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
    table: ChunkTable,
    out: Tensor,
    kept_states: Tensor | None = None,
    kept_tails: Tensor | None = None,
) -> Tensor:
    """Take rows of any lengths through convolution, delta rule, norm and output gate.

    At each of the table's cuts, the row's state and convolution tail as they stand there are kept. Chunks begin anew
    behind a cut, so that a row goes on as one does that begins from what was kept.

    Args:
        projected, recurrent, conv_weight, a_log, dt_bias, norm_weight, norm_eps, states, tails: as
            `trivet.ops.fused.delta_decode.delta_decode` takes them; ``projected [tokens, elements]``.
        slots: int64 ``[rows]``, different from each other.
        table: the rows.
        out: ``[tokens, value_elements]``, contiguous; the output.
        kept_states, kept_tails: the layer's snapshots, of the strides of `states` and `tails`; wanted if the table has
            cuts. Those of the cuts are written.

    Returns:
        `out`.

    Raises:
        ValueError: the table has cuts, and snapshots are missing or of other strides.
    """
    if table.cuts:
        for kept, held in ((kept_states, states), (kept_tails, tails)):
            if kept is None or kept.stride() != held.stride():
                found = None if kept is None else kept.stride()
                raise ValueError(f"cuts of rows: found snapshots of strides {found}, expected {held.stride()}")
    inputs = delta_inputs(projected, recurrent, conv_weight, a_log, dt_bias, tails, slots, table, kept_tails)
    mixed = chunked_delta_rule(inputs, states, slots, table, kept_states)
    heads = (recurrent.value_heads, recurrent.value_dim)
    gates = projected[:, recurrent.conv_channels : recurrent.conv_channels + recurrent.value_elements]
    gated_rms_norm(mixed, gates.unflatten(1, heads), norm_weight, norm_eps, out=out.unflatten(1, heads))
    return out
