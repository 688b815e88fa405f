"""Causal depthwise convolution followed by SiLU, over rows whose past is carried as a short tail.

A row's tail holds its last ``kernel - 1`` inputs, oldest first, in the dtype of the inputs; zeros before the
first token. It is transformers' ``conv_state`` without the newest entry, which the convolution of the next token
does not read. Shapes say ``[rows, channels, kernel - 1]``; the memory behind them is quickest when channels lie
together, as in ``pool[rows, kernel - 1, channels].transpose(1, 2)``, which is also how new tails come back.
Weights are ``[channels, kernel]``, the newest tap last, and quickest when channels lie together likewise.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from trivet.ops.packed import PackedRows
from trivet.ops.precision import accumulation_dtype


def causal_conv_decode(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve one new token of each row.

    Args:
        x: ``[rows, channels]``.
        weight: ``[channels, kernel]``.
        state: ``[rows, channels, kernel - 1]``, in the dtype of `x`.

    Returns:
        ``silu`` of the convolution, ``[rows, channels]``, and the new tails, both new tensors in the dtype
        of `x`. Sums are taken in float32.
    """
    window = torch.cat((state.transpose(1, 2), x.unsqueeze(1)), dim=1)
    y = (_accumulator(window) * weight.t().contiguous()).sum(1)
    return F.silu(y, inplace=True).to(x.dtype), window[:, 1:].transpose(1, 2)


def causal_conv_prefill(x: Tensor, weight: Tensor, state: Tensor, packed: PackedRows) -> tuple[Tensor, Tensor]:
    """Convolve rows of any lengths in one call.

    The packed tokens are convolved as if they were one row, which is right but for the first ``kernel - 1``
    tokens of each row; those are worked out again from the carried tails and written over.

    Args:
        x: ``[tokens, channels]``, the rows of `packed` one after the other.
        weight: ``[channels, kernel]``.
        state: ``[rows, channels, kernel - 1]``, the tails before these tokens, in the dtype of `x`.
        packed: the rows.

    Returns:
        ``silu`` of the convolution, ``[tokens, channels]``, and the new tails, both new tensors in the dtype
        of `x`. Sums are taken in float32.

    Raises:
        ValueError: `x` or `state` does not fit `packed`.
    """
    if x.shape[0] != packed.tokens or state.shape[0] != packed.rows:
        raise ValueError(
            f"causal convolution: found {x.shape[0]} tokens and {state.shape[0]} tails, expected "
            f"{packed.tokens} and {packed.rows} as packed"
        )
    if packed.single:
        return causal_conv_decode(x, weight, state)
    kernel = weight.shape[1]
    inputs = _accumulator(x)
    taps = weight.t().contiguous().to(inputs.dtype).unbind(0)
    y = inputs * taps[-1]
    if kernel == 1:
        return F.silu(y, inplace=True).to(x.dtype), state.clone()
    # Newest tap first, here and for the heads below, so that both add up in the same order.
    for distance in range(1, kernel):
        y[distance:].addcmul_(inputs[:-distance], taps[kernel - 1 - distance])

    edges = packed.edges(kernel)
    window = torch.cat((state.transpose(1, 2).reshape(-1, x.shape[1]), x.index_select(0, edges.tokens)))
    under = _accumulator(window).index_select(0, edges.taps).view(kernel, -1, x.shape[1]).unbind(0)
    heads = under[-1] * taps[-1]
    for tap, entries in zip(reversed(taps[:-1]), reversed(under[:-1]), strict=True):
        heads.addcmul_(entries, tap)
    y.index_copy_(0, edges.heads, heads)
    tails = window.index_select(0, edges.tails).view(packed.rows, kernel - 1, -1)
    return F.silu(y, inplace=True).to(x.dtype), tails.transpose(1, 2)


def _accumulator(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))
