"""From the logits of a group of rows to the token that each draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from trivet.sampling.noise import exponential_noise
from trivet.sampling.ranking import ranked_tokens

if TYPE_CHECKING:
    from torch import Tensor

_MASS_UNIT = 2.0**40
"""Probabilities are summed as integers in units of 2**-40 of the largest: an integer sum has no rounding, so
that it is the same in whatever order a device adds; 2**23 tokens fit int64."""

_FIRST_LOOK = 256
"""Candidates that a top-p row looks at before the whole vocabulary is sorted for it."""


@frozen(eq=False)
class DrawParameters:
    """What a group of rows draws by; every tensor is [rows].

    Attributes:
        temperature: float32, above 0, or 0 where the row takes its first candidate.
        top_k: int64, 0 for all.
        top_p: float64.
        min_p: float32.
        keys: of `row_keys`.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: tuple[Tensor, Tensor]

    def of(self, rows: Tensor) -> DrawParameters:
        """The same for a selection of the rows."""
        return DrawParameters(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            (self.keys[0][rows], self.keys[1][rows]),
        )


def draw(logits: Tensor, parameters: DrawParameters, hashes: Tensor) -> Tensor:
    """Draw from rows that only have a temperature and perhaps min-p, without ordering anything.

    Args:
        logits: float32 [rows, vocabulary]; overwritten.
        parameters: of these rows.
        hashes: of `token_hashes`.

    Returns:
        int64 [rows].
    """
    weights = _relative(logits, logits.amax(-1, keepdim=True), parameters.temperature)
    weights.masked_fill_(weights < parameters.min_p.unsqueeze(-1), 0.0)
    return weights.div_(exponential_noise(hashes, parameters.keys)).argmax(-1)


def draw_among_first(logits: Tensor, parameters: DrawParameters, hashes: Tensor, count: int) -> Tensor:
    """Draw from rows whose top-k, at least 1 and at most `count` each, bounds what has to be ordered.

    Args, returns: as `draw`; `logits` are kept.
    """
    choice, _ = _draw_ranked(logits, parameters, hashes, count, None)
    return choice


def draw_nucleus(logits: Tensor, parameters: DrawParameters, hashes: Tensor) -> Tensor:
    """Draw from rows that may have any top-p and any top-k.

    Where looking at a result costs nothing, which is on the CPU, a short list of candidates is tried first,
    and only rows whose set is longer are sorted. Both ways give the same token.

    Args, returns: as `draw`; `logits` are kept.
    """
    vocabulary = logits.shape[-1]
    mass = _mass(_relative(logits.clone(), logits.amax(-1, keepdim=True), parameters.temperature)).sum(-1)
    if logits.device.type != "cpu" or vocabulary <= _FIRST_LOOK:
        choice, _ = _draw_ranked(logits, parameters, hashes, vocabulary, mass)
        return choice
    choice, complete = _draw_ranked(logits, parameters, hashes, _FIRST_LOOK, mass)
    longer = (~complete).nonzero().squeeze(-1)
    if len(longer):
        rest = parameters.of(longer)
        choice[longer], _ = _draw_ranked(logits[longer], rest, hashes, vocabulary, mass[longer])
    return choice


def _draw_ranked(
    logits: Tensor, parameters: DrawParameters, hashes: Tensor, count: int, vocabulary_mass: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The token of each row, int64 [rows], and whether `count` candidates were enough for it, bool [rows].

    `vocabulary_mass` is that of all tokens, int64 [rows]; None where every row has a top-k.
    """
    vocabulary = logits.shape[-1]
    tokens = ranked_tokens(logits, count)
    candidates = logits.gather(-1, tokens)
    weights = _relative(candidates, candidates[:, :1].clone(), parameters.temperature)
    top_k = parameters.top_k.unsqueeze(-1)
    kept = (torch.arange(count, device=logits.device) < top_k) | (top_k == 0)

    masses = _mass(weights).masked_fill_(~kept, 0)
    reached = masses.cumsum(-1)
    total = reached[:, -1]
    if vocabulary_mass is not None:
        total = torch.where(parameters.top_k > 0, total, vocabulary_mass)
    needed = (parameters.top_p * total).ceil().to(torch.int64)
    needed = torch.where(parameters.top_p < 1.0, needed, torch.iinfo(torch.int64).max)
    # A token stays while those before it have not reached top-p, so that the one that reaches it stays too.
    kept &= (reached - masses) < needed.unsqueeze(-1)
    kept &= weights >= parameters.min_p.unsqueeze(-1)

    scores = weights.masked_fill_(~kept, 0.0).div_(exponential_noise(hashes[tokens], parameters.keys))
    # The lowest id among equal scores, as `draw` takes it.
    best = torch.where(scores == scores.amax(-1, keepdim=True), tokens, vocabulary - 1).amin(-1)
    choice = torch.where(parameters.temperature > 0, best, tokens[:, 0])
    complete = torch.where(parameters.top_k > 0, parameters.top_k <= count, reached[:, -1] >= needed)
    return choice, complete


def _relative(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities relative to the most probable token's, after the temperature, in place of `logits`.

    The largest is subtracted first, so that the most probable token weighs 1 at however low a temperature.
    """
    divisor = torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1)
    return logits.sub_(largest).div_(divisor).exp_()


def _mass(weights: Tensor) -> Tensor:
    return (weights * _MASS_UNIT).to(torch.int64)
