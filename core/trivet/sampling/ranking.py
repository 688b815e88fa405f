"""The most probable tokens of every row, in one order that ties cannot disturb."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_LOW_32 = 2**32 - 1


def ranked_tokens(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits of each row, int64 [rows, count]: larger first, then lower ids.

    torch's own ``topk`` leaves the order of equals open, and logits in bfloat16 are full of them. Here each
    logit and its id become one 64-bit key, and no two keys are equal.

    Args:
        logits: float32 [rows, vocabulary], contiguous. A row with NaN gets some valid ids.
        count: at most the vocabulary; the whole vocabulary is a sort.
    """
    vocabulary = logits.shape[-1]
    # Adding zero turns -0 into +0, which is equal to it and has other bits.
    bits = (logits + 0.0).view(torch.int32)
    # Negative floats order backwards as integers; flipping all but the sign turns them round.
    bits ^= (bits >> 31).bitwise_and_(2**31 - 1)
    keys = bits.to(torch.int64).bitwise_left_shift_(32)
    keys |= torch.arange(_LOW_32, _LOW_32 - vocabulary, -1, dtype=torch.int64, device=logits.device)
    if count >= vocabulary:
        ordered = keys.sort(dim=-1, descending=True).values
    else:
        ordered = keys.topk(count, dim=-1).values
    return ordered.bitwise_and_(_LOW_32).neg_().add_(_LOW_32)
