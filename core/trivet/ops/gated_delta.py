"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464), token by token and in chunks.

Each value head keeps a state ``S`` of shape ``[key_dim, value_dim]``. A token with key ``k``, query ``q`` (both
of unit length), value ``v``, decay ``a`` and rate ``b`` changes it and reads it:

    S <- a S + k (b (v - (a S)^T k))^T          out = S^T q / sqrt(key_dim)

Value head ``i`` uses key head ``i // (value_heads / key_heads)``. Decays come as logarithms, at most 0. All is
computed in float32 (in float64 for float64 inputs), and outputs are rounded to the dtype of the values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from trivet.ops.packed import ChunkGrid, PackedRows
from trivet.ops.precision import accumulation_dtype

UNIT_LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys, as in flash-linear-attention and transformers."""


def decay_and_beta(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """How much each value head forgets and learns at each token.

    Args:
        a, b: ``[tokens, value_heads]``, projections of the hidden state.
        a_log, dt_bias: ``[value_heads]``, the parameters ``A_log`` and ``dt_bias``.

    Returns:
        ``(log_decay, beta)``: ``-exp(a_log) * softplus(a + dt_bias)`` in float32, at most 0, and
        ``sigmoid(b)`` in the dtype of `b`.
    """
    dtype = accumulation_dtype(a.dtype)
    rate = a_log.to(dtype).exp().neg_()
    return F.softplus(a.to(dtype) + dt_bias.to(dtype)).mul_(rate), torch.sigmoid(b)


def gated_delta_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    out_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take one recurrent step for one token of each row.

    Args:
        query, key: ``[rows, key_heads, key_dim]``, of any length; they are normalised here.
        value: ``[rows, value_heads, value_dim]``.
        log_decay: ``[rows, value_heads]``, float32.
        beta: ``[rows, value_heads]``.
        state: ``[rows, value_heads, key_dim, value_dim]``, float32.
        out_state: contiguous, where the new state goes; it may be `state` itself. None: a new tensor.

    Returns:
        ``(out, new_state)``: ``[rows, value_heads, value_dim]`` in the dtype of `value`, and the new state.

    Raises:
        ValueError: the heads do not divide, or `state` has another dtype than the computation.
    """
    dtype = accumulation_dtype(value.dtype)
    rows, value_heads, value_dim = value.shape
    key_dim = key.shape[-1]
    expansion = _expansion(key, value, state, dtype)
    heads = rows * value_heads

    # One tensor for both, with the key heads repeated: [heads, 2, key_dim].
    pairs = torch.cat((query, key) * expansion, dim=-1).to(dtype).view(heads, 2, key_dim)
    pairs = pairs.mul_(_inverse_length(pairs))
    queries, keys = pairs.unbind(1)
    decay = log_decay.to(dtype).exp().view(heads, 1, 1)
    old = state.reshape(heads, key_dim, value_dim)

    # Both reads are of the old state, so that it passes through the cache once less.
    read, predicted = torch.bmm(pairs, old).mul_(decay).unbind(1)
    change = (value.reshape(heads, value_dim) - predicted).mul_(beta.reshape(heads, 1))
    new = torch.mul(old, decay, out=None if out_state is None else out_state.view(old.shape))
    new.addcmul_(keys.unsqueeze(2), change.unsqueeze(1))
    alignment = torch.linalg.vecdot(queries, keys).unsqueeze(1)
    out = torch.addcmul(read, alignment, change).mul_(key_dim**-0.5)
    return out.view(value.shape).to(value.dtype), new.view(state.shape)


def gated_delta_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    packed: PackedRows,
) -> tuple[Tensor, Tensor]:
    """Take rows of any lengths through the delta rule, each from its own state.

    Rows of one token take a recurrent step; the others are cut into chunks, inside which the rule is solved as
    one triangular system, and which are scanned in order, for all rows at once.

    Args:
        query, key: ``[tokens, key_heads, key_dim]``, the rows of `packed` one after the other.
        value: ``[tokens, value_heads, value_dim]``.
        log_decay: ``[tokens, value_heads]``, float32, at most 0.
        beta: ``[tokens, value_heads]``.
        state: ``[rows, value_heads, key_dim, value_dim]``, float32; not changed.
        packed: the rows.

    Returns:
        ``(out, new_state)``: ``[tokens, value_heads, value_dim]`` in the dtype of `value`, and a new tensor
        with the state after each row's last token.

    Raises:
        ValueError: shapes that do not fit `packed` or each other, or a state of the wrong dtype.
    """
    if value.shape[0] != packed.tokens or state.shape[0] != packed.rows:
        raise ValueError(
            f"gated delta rule: found {value.shape[0]} tokens and {state.shape[0]} states, expected "
            f"{packed.tokens} and {packed.rows} as packed"
        )
    inputs = (query, key, value, log_decay, beta)
    if packed.single:
        return gated_delta_decode(*inputs, state)
    outs: list[tuple[Tensor | None, Tensor]] = []
    states: list[tuple[Tensor | None, Tensor]] = []
    for grid in packed.grids:
        out, new_state = _chunked(*inputs, state, grid)
        outs.append((grid.tokens, out))
        states.append((grid.rows, new_state))
    if packed.singles is not None:
        rows, tokens = packed.singles.rows, packed.singles.tokens
        q, k, v, decay, rate = (x.index_select(0, tokens) for x in inputs)
        gathered = state.index_select(0, rows)
        out, new_state = gated_delta_decode(q, k, v, decay, rate, gathered, gathered)
        outs.append((tokens, out))
        states.append((rows, new_state))
    return _assembled(outs, value.shape), _assembled(states, state.shape)


def _assembled(parts: list[tuple[Tensor | None, Tensor]], shape: torch.Size) -> Tensor:
    """Put parts back in their places along the first dimension; a part without places is the whole."""
    places, part = parts[0]
    if places is None:
        return part
    whole = torch.empty(shape, dtype=part.dtype, device=part.device)
    for places, part in parts:
        assert places is not None  # only a part that is alone is the whole
        whole.index_copy_(0, places, part)
    return whole


def _chunked(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, grid: ChunkGrid
) -> tuple[Tensor, Tensor]:
    """The chunked form: outputs of the grid's tokens and new states of its rows, in the grid's order.

    Within a chunk, let ``c_i`` be the logarithm of the decay from the chunk's start to token ``i``. What token
    ``i`` writes, ``u_i``, depends on the state ``S`` before the chunk and on what the tokens before it wrote:

        u_i = b_i (v_i - exp(c_i) S^T k_i) - sum_{j<i} b_i exp(c_i - c_j) (k_i . k_j) u_j

    which is a unit lower triangular system. Padded places have ``b = 0`` and no decay: they write nothing.
    """
    dtype = accumulation_dtype(value.dtype)
    key_heads, key_dim = key.shape[1:]
    value_heads, value_dim = value.shape[1:]
    expansion = _expansion(key, value, state, dtype)
    chunks, chunk = grid.chunks, grid.chunk_tokens

    def placed(x: Tensor) -> Tensor:
        return x.index_select(0, grid.source).to(dtype).view(chunks, chunk, *x.shape[1:])

    # Queries and keys at unit length: [chunks, key_heads, 2, chunk, key_dim].
    pairs = torch.empty((chunks, key_heads, 2, chunk, key_dim), dtype=dtype, device=value.device)
    for into, vectors, scale in zip(pairs.unbind(2), (query, key), (key_dim**-0.5, 1.0), strict=True):
        rows = placed(vectors)
        lengths = _inverse_length(rows).mul_(scale)
        torch.mul(rows.transpose(1, 2), lengths.transpose(1, 2), out=into)
    keys = pairs[:, :, 1]

    rates, decays = placed(beta), placed(log_decay)
    if grid.padding is not None:
        rates.masked_fill_(grid.padding, 0.0)
        decays.masked_fill_(grid.padding, 0.0)
    rates = rates.transpose(1, 2).contiguous()
    logs = decays.transpose(1, 2).cumsum(-1)
    from_start = logs.exp()
    to_end = (logs[..., -1:] - logs).exp_()

    def per_key_head(x: Tensor, *shape: int) -> Tensor:
        return x.view(chunks, key_heads, expansion, *shape)

    # Decay between any two tokens of a chunk. Masked before it is taken out of its logarithm: backwards in time
    # it is a growth, which overflows.
    between = (logs.unsqueeze(-1) - logs.unsqueeze(-2)).masked_fill_(grid.future, -torch.inf).exp_()
    between = per_key_head(between, chunk, chunk)
    products = torch.bmm(pairs.view(-1, 2 * chunk, key_dim), pairs.view(-1, 2, chunk, key_dim)[:, 1].mT)
    products = products.view(chunks, key_heads, 1, 2, chunk, chunk)
    attention = between * products[:, :, :, 0]
    system = between.mul_(products[:, :, :, 1]).mul_(per_key_head(rates, chunk, 1))

    readers = per_key_head(torch.stack((from_start, from_start * rates), dim=2), 2, chunk, 1) * pairs.unsqueeze(2)
    writers = per_key_head(to_end, chunk, 1) * keys.unsqueeze(2)
    changes = torch.empty((chunks, value_heads, chunk, value_dim), dtype=dtype, device=value.device)
    torch.mul(placed(value).transpose(1, 2), rates.unsqueeze(-1), out=changes)

    def per_chunk_number(x: Tensor, *shape: int) -> tuple[Tensor, ...]:
        return torch.split(x.reshape(-1, *shape), [active * value_heads for active in grid.active_rows])

    states = state.clone() if grid.rows is None else state.index_select(0, grid.rows)
    every_state = states.view(-1, key_dim, value_dim)
    for change, rule, reader, seen, writer, decay in zip(
        per_chunk_number(changes, chunk, value_dim),
        per_chunk_number(system, chunk, chunk),
        per_chunk_number(readers, 2, chunk, key_dim),
        per_chunk_number(attention, chunk, chunk),
        per_chunk_number(writers, chunk, key_dim),
        per_chunk_number(from_start[..., -1], 1, 1),
        strict=True,
    ):
        active = every_state[: change.shape[0]]
        change.baddbmm_(reader[:, 1], active, alpha=-1)
        written = torch.linalg.solve_triangular(rule, change, upper=False, unitriangular=True)
        # The right-hand sides are spent: the outputs take their place.
        torch.bmm(reader[:, 0], active, out=change)
        change.baddbmm_(seen, written)
        active.mul_(decay).baddbmm_(writer.mT, written)

    out = changes.transpose(1, 2).reshape(-1, value_heads, value_dim).index_select(0, grid.places)
    return out.to(value.dtype), states


def _inverse_length(vectors: Tensor) -> Tensor:
    """One over the length of each vector of the last dimension, which is kept with size 1."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    floor = torch.scalar_tensor(UNIT_LENGTH_EPS, dtype=vectors.dtype, device=vectors.device)
    return torch.addcmul(floor, length, length).rsqrt_()


def _expansion(key: Tensor, value: Tensor, state: Tensor, dtype: torch.dtype) -> int:
    """Value heads per key head; refuses what the arithmetic would silently get wrong."""
    key_heads, value_heads = key.shape[1], value.shape[1]
    if value_heads % key_heads:
        raise ValueError(
            f"gated delta rule: found {value_heads} value heads over {key_heads} key heads, expected a multiple"
        )
    if state.dtype is not dtype:
        raise ValueError(f"gated delta rule: the state is {state.dtype}, expected {dtype} for values of {value.dtype}")
    return value_heads // key_heads
