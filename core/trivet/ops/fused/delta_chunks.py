"""Rows of any lengths through a Gated DeltaNet layer, between its two projections: chunk by chunk.

What chunks do each for itself is done by flash-linear-attention's kernels; `trivet.ops.fused.delta_scan` takes the
states from chunk to chunk, and reads the outputs beside that. The kernels of fla.ops.gated_delta_rule are launched
here, not through the functions around them:

- those time many configurations of each kernel at its first call, for minutes, and different processes may settle on
  different ones, whose results differ in rounding. Here the configurations are fixed;
- those keep what they work out about the rows by the identity of a tensor, so that one that is refilled in place gets
  what its first contents gave. Here `trivet.ops.packed.ChunkTable` holds it, once per step;
- several of the tensors that those allocate can be one, since each program reads its part before it writes it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from attrs import evolve, field, frozen
from torch import Tensor

from trivet.capacity.fused import beyond_chunk_kernels, missing_fla
from trivet.geometry import RecurrentGeometry
from trivet.launch import lean
from trivet.ops.fused.delta_inputs import delta_inputs
from trivet.ops.fused.delta_scan import delta_scan, delta_weights
from trivet.ops.fused.gated_norm import gated_rms_norm
from trivet.ops.packed import ChunkTable
from trivet.reservation.recurrent import DEVICE_CHUNK_TOKENS, LEAST_TILE

SOLVED_BLOCK = DEVICE_CHUNK_TOKENS // 4
"""Tokens of a diagonal block of a chunk's triangular system (``BC``), of which the library's kernel solves four."""

WRITTEN_BLOCK = 64
"""Key or value dimensions that the kernel of the writes takes at once (``BK``, ``BV``)."""


@frozen
class ChunkConfigs:
    """How each kernel is launched: its blocks, ``num_warps`` and ``num_stages``.

    Blocks are of key or value dimensions, and smaller where heads are.

    Attributes:
        solve: inverts each chunk's triangular system.
        write: what each token writes, and what it reads of the state before its chunk.
        scan: takes the state from chunk to chunk, and reads the outputs.
    """

    solve: dict[str, int] = field(factory=lambda: {"BK": 128, "num_warps": 1, "num_stages": 3})
    write: dict[str, int] = field(factory=lambda: {"num_warps": 8, "num_stages": 3})
    scan: dict[str, int] = field(factory=lambda: {"BLOCK_V": 64, "num_warps": 8, "num_stages": 3})


CONFIGS = ChunkConfigs()
"""The fastest of those measured on an H200."""

THREE_STAGES_BYTES = 196_608
"""Of shared memory, which the scan takes on that device."""


def configs_within(room_bytes: int) -> ChunkConfigs:
    """`CONFIGS`, with fewer stages where a program's shared memory has no room for them: they change no bit."""
    return CONFIGS if room_bytes >= THREE_STAGES_BYTES else evolve(CONFIGS, scan=CONFIGS.scan | {"num_stages": 2})


@cache
def served_configs(device: int) -> ChunkConfigs:
    """What fits the device of this number; -1 where kernels are interpreted."""
    if device < 0:
        return CONFIGS
    return configs_within(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


@frozen(eq=False)
class ChunkKernels:
    """The library's kernels, bare of what chooses their configurations."""

    solve: Any
    write: Any


@cache
def chunk_kernels() -> ChunkKernels | None:
    """The kernels; None where the library is missing or of another version."""
    if missing_fla() is not None:
        return None
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_kkt_solve_kernel
    from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd_kernel

    return ChunkKernels(
        solve=lean(_bare(chunk_gated_delta_rule_fwd_kkt_solve_kernel)),
        write=lean(_bare(recompute_w_u_fwd_kernel)),
    )


def _bare(kernel: Any) -> Any:
    """The kernel inside its heuristics and its autotuner."""
    while isinstance(kernel, (triton.runtime.Autotuner, triton.runtime.Heuristics)):
        kernel = kernel.fn
    return kernel


def chunks_serve(recurrent: RecurrentGeometry) -> bool:
    """Whether the kernels are there and take such a layer."""
    return beyond_chunk_kernels(recurrent) is None and chunk_kernels() is not None


def chunked_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    table: ChunkTable,
    kept_states: Tensor | None = None,
    configs: ChunkConfigs | None = None,
) -> Tensor:
    """The delta rule over rows of any lengths, each from the state of its slot.

    Args:
        query, key, value, decay, beta: as `trivet.ops.fused.delta_inputs.DeltaInputs` has them, all contiguous.
        states, slots, table, kept_states: as `trivet.ops.fused.delta_scan.delta_scan` takes them.
        configs: how the kernels are launched; None: as `served_configs` says.

    Returns:
        ``[tokens, value_heads, value_dim]``, in the dtype of `value`.
    """
    configs = configs or served_configs(key.get_device())
    kernels = chunk_kernels()
    assert kernels is not None  # chunks_serve said so
    (tokens, key_heads, key_dim), (_, heads, value_dim) = key.shape, value.shape
    chunk, chunks = table.chunk_tokens, len(table.chunks)
    shape = {"T": tokens, "H": key_heads, "HV": heads, "K": key_dim, "BT": chunk}
    gated = {"USE_G": True, "IS_VARLEN": True}
    of_chunks = {"cu_seqlens": table.starts, "chunk_indices": table.chunks} | gated

    inverse, weights = value.new_empty((tokens, heads, chunk)), value.new_empty((tokens, heads, chunk))
    delta_weights(query, key, decay, table, inverse, weights, SOLVED_BLOCK)
    solved = configs.solve | {"BK": min(configs.solve["BK"], max(triton.next_power_of_2(key_dim), LEAST_TILE))}
    kernels.solve[(chunks, heads)](
        k=key, g=decay, beta=beta, A=inverse, BC=SOLVED_BLOCK, **of_chunks, **shape, **solved
    )  # fmt: skip
    readers = key.new_empty((tokens, heads, key_dim))
    written = torch.empty_like(value)
    kernels.write[(chunks, heads)](
        k=key,
        v=value,
        beta=beta,
        w=readers,
        u=written,
        A=inverse,
        g=decay,
        V=value_dim,
        **({"BK": WRITTEN_BLOCK, "BV": WRITTEN_BLOCK} | of_chunks | shape | configs.write),
    )
    delta_scan(query, key, weights, readers, written, decay, states, kept_states, slots, table, configs.scan)
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
    mixed = chunked_delta_rule(
        inputs.query, inputs.key, inputs.value, inputs.decay, inputs.beta, states, slots, table, kept_states
    )
    heads = (recurrent.value_heads, recurrent.value_dim)
    gates = projected[:, recurrent.conv_channels : recurrent.conv_channels + recurrent.value_elements]
    gated_rms_norm(mixed, gates.unflatten(1, heads), norm_weight, norm_eps, out=out.unflatten(1, heads))
    return out
