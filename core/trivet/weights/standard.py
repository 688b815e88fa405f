"""Parameter groups that most decoder families share, with the fusions done at load. Free of torch.

Each function names parameters below `name` (in the model) that fill from tensors below `disk` (in the checkpoint).
The shared layers ask for the same names.
"""

from __future__ import annotations

from trivet.geometry import AttentionGeometry
from trivet.weights.map import Initial, ParameterSpec, Part

NORM_SPREAD = 0.1
PEAKED = 3.0
"""Random query and key projections are widened by this, so that random attention is peaked rather than uniform."""


def matrix(name: str, disk: str, rows: int, columns: int, *, gain: float = 1.0) -> ParameterSpec:
    """One projection ``[rows, columns]`` that keeps its checkpoint's single tensor."""
    return stacked(name, ((disk, rows),), columns, gain=gain)


def stacked(name: str, disks: tuple[tuple[str, int], ...], columns: int, *, gain: float = 1.0) -> ParameterSpec:
    """Projections that share their input, stacked row-wise into one matrix: ``disks`` gives ``(name, rows)``."""
    parts = tuple(Part(disk, (rows, columns)) for disk, rows in disks)
    rows = sum(rows for _, rows in disks)
    return ParameterSpec(name, (rows, columns), parts, initial=Initial.normal(gain * columns**-0.5))


def stacked_bias(name: str, disks: tuple[tuple[str, int], ...]) -> ParameterSpec:
    """The biases of stacked projections."""
    parts = tuple(Part(disk, (rows,)) for disk, rows in disks)
    return ParameterSpec(name, (sum(rows for _, rows in disks),), parts, initial=Initial.normal(0.02))


def norm(name: str, disk: str, size: int, *, centre: float = 1.0) -> ParameterSpec:
    """The weight of an RMS norm; `centre` 0 for norms that multiply by ``1 + weight``."""
    return ParameterSpec(name, (size,), (Part(disk, (size,)),), initial=Initial.near(centre, NORM_SPREAD))


def attention(
    name: str,
    disk: str,
    geometry: AttentionGeometry,
    hidden_size: int,
    *,
    bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    output_gate: bool = False,
    norm_centre: float = 1.0,
) -> tuple[ParameterSpec, ...]:
    """Query, key and value projections fused into ``qkv``, the output projection, and norms of queries and keys.

    Args:
        bias: biases on the three input projections (``attention_bias``).
        output_bias: a bias on the output projection.
        qk_norm: RMS norms over each query and key head.
        output_gate: the query projection holds, head by head, the query and then its output gate.
        norm_centre: where the norms' weights lie around; 0 for zero-centred norms.
    """
    queries = geometry.query_elements * (2 if output_gate else 1)
    rows = (("q_proj", queries), ("k_proj", geometry.kv_elements), ("v_proj", geometry.kv_elements))
    specs = [
        stacked(
            f"{name}.qkv.weight",
            tuple((f"{disk}.{part}.weight", n) for part, n in rows),
            hidden_size,
            gain=PEAKED**0.5,
        ),
        matrix(f"{name}.out.weight", f"{disk}.o_proj.weight", hidden_size, geometry.query_elements),
    ]
    if bias:
        specs.append(stacked_bias(f"{name}.qkv.bias", tuple((f"{disk}.{part}.bias", n) for part, n in rows)))
    if output_bias:
        specs.append(stacked_bias(f"{name}.out.bias", ((f"{disk}.o_proj.bias", hidden_size),)))
    if qk_norm:
        for part in ("q_norm", "k_norm"):
            specs.append(norm(f"{name}.{part}.weight", f"{disk}.{part}.weight", geometry.head_dim, centre=norm_centre))
    return tuple(specs)


def gated_mlp(name: str, disk: str, hidden_size: int, intermediate_size: int) -> tuple[ParameterSpec, ...]:
    """Gate and up projections fused into ``gate_up``, and the down projection."""
    halves = ((f"{disk}.gate_proj.weight", intermediate_size), (f"{disk}.up_proj.weight", intermediate_size))
    return (
        stacked(f"{name}.gate_up.weight", halves, hidden_size),
        matrix(f"{name}.down.weight", f"{disk}.down_proj.weight", hidden_size, intermediate_size),
    )


def embeddings(disk: str, vocab_size: int, hidden_size: int, *, tied: bool) -> tuple[ParameterSpec, ...]:
    """The token embedding, and the output projection where it is a matrix of its own.

    Args:
        disk: prefix of ``embed_tokens.weight``, with its dot; ``lm_head.weight`` lies at the root.
        tied: whether the output projection is the embedding itself.
    """
    embed = matrix("embedding.weight", f"{disk}embed_tokens.weight", vocab_size, hidden_size)
    if tied:
        return (embed,)
    return (embed, matrix("output.weight", "lm_head.weight", vocab_size, hidden_size))
