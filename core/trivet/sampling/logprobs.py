"""Natural log-probabilities of the model's own distribution: of new tokens, and of a prompt's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from trivet.sampling.layout import chunk_rows
from trivet.sampling.ranking import ranked_tokens

if TYPE_CHECKING:
    from torch import Tensor

ROW_GRAIN = 4
"""Elements of float32 in the 16 bytes that a CUDA thread loads at once."""


@frozen
class TokenLogprob:
    """A token's log-probability under the unmodified distribution of the model.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability.
        top: the most probable tokens, (token id, log-probability), most probable first, then lowest ids.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen(eq=False)
class Logprobs:
    """Log-probabilities of some rows, on the device.

    Attributes:
        token_ids: int64 [rows], the token that each row is about.
        chosen: float32 [rows], its log-probability.
        top_ids: int64 [rows, alternatives].
        top: float32 [rows, alternatives].
    """

    token_ids: Tensor
    chosen: Tensor
    top_ids: Tensor
    top: Tensor

    def packed(self) -> Tensor:
        """Everything in one int64 tensor [rows, 2 + 2 * alternatives], so that it crosses in one transfer."""
        numbers = torch.cat([self.chosen.unsqueeze(-1), self.top], -1).view(torch.int32).to(torch.int64)
        return torch.cat([self.token_ids.unsqueeze(-1), numbers, self.top_ids], -1)

    def tolist(self, alternatives: Sequence[int] | None = None) -> list[TokenLogprob]:
        """One value per row, with as many `alternatives` as are given for it, or all, in one transfer."""
        return unpacked(self.packed().cpu(), alternatives)


def unpacked(packed: Tensor, alternatives: Sequence[int] | None = None) -> list[TokenLogprob]:
    """What `Logprobs.packed` packed, from a tensor on the host; `alternatives` as in `Logprobs.tolist`."""
    most = packed.shape[-1] // 2 - 1
    ids = packed[:, 0].tolist()
    numbers = packed[:, 1 : 2 + most].to(torch.int32).view(torch.float32).tolist()
    top_ids = packed[:, 2 + most :].tolist()
    counts = [most] * len(ids) if alternatives is None else alternatives
    return [
        TokenLogprob(token, row[0], tuple(zip(top[:count], row[1 : 1 + count], strict=True)))
        for token, row, top, count in zip(ids, numbers, top_ids, counts, strict=True)
    ]


def token_logprobs(logits: Tensor, targets: Tensor, top: int = 0, rows: Tensor | None = None) -> Logprobs:
    """Log-probabilities of `targets` and of the `top` most probable tokens, by log-softmax in float32.

    Args:
        logits: [rows, vocabulary] in the model's dtype; kept.
        targets: int64, on the same device, one for each row that is scored.
        top: alternatives to report; more than the vocabulary gives the vocabulary.
        rows: int64, on the same device, the rows of `logits` to score; None scores all.

    Returns:
        NaN for rows whose logits hold NaN.
    """
    vocabulary, scored = logits.shape[1], len(targets)
    top = min(top, vocabulary)
    chosen = torch.empty(scored, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(scored, top, dtype=torch.int64, device=logits.device)
    top_values = torch.empty(scored, top, dtype=torch.float32, device=logits.device)
    step = chunk_rows(vocabulary, logits.device.type)
    for start in range(0, scored, step):
        part = slice(start, start + step)
        values = (logits[part] if rows is None else logits[rows[part]]).float()
        scores = torch.log_softmax(_aligned_rows(values), dim=-1)
        chosen[part] = scores.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1)
        if top:
            # Ranked by the logits: subtracting the normaliser rounds, and makes equals of what was not equal.
            ids = ranked_tokens(values, top)
            top_ids[part] = ids
            top_values[part] = scores.gather(-1, ids)
    return Logprobs(targets, chosen, top_ids, top_values)


def _aligned_rows(values: Tensor) -> Tensor:
    """`values`, on CUDA with columns of probability 0 behind them where rows would not start at multiples of 16 bytes.

    torch's softmax there sums a row in an order that depends on where in memory it starts, and with that on its place
    among the rows.
    """
    uneven = -values.shape[1] % ROW_GRAIN
    if not uneven or not values.is_cuda:
        return values
    return torch.nn.functional.pad(values, (0, uneven), value=-torch.inf)
