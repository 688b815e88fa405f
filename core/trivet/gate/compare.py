"""How far the runtime is from the reference, over the sequences of a pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from attrs import asdict, frozen

from trivet.gate.bounds import Bounds
from trivet.gate.reference import Told
from trivet.gate.session import Served

DECIMALS = 6


@frozen
class Compared:
    """One sequence, position by position. Natural logarithms.

    Attributes:
        prompt_tokens, cached_tokens: of the prompt.
        token_ids: new tokens.
        regrets: the reference's best log-probability less that of the runtime's token.
        deltas: absolute differences over the reference's most probable tokens, as far as the runtime reported them.
        listed: how many the reference lists at each position, reported or not.
    """

    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]
    regrets: tuple[float, ...]
    deltas: tuple[tuple[float, ...], ...]
    listed: int

    @classmethod
    def of(cls, served: Served, told: Told) -> Compared:
        """Hold what was served against what the reference says of the same tokens."""
        regrets = [best - chosen for best, chosen in zip(told.best.tolist(), told.chosen.tolist(), strict=True)]
        deltas = []
        for ours, ids, values in zip(served.logprobs, told.top_ids.tolist(), told.top.tolist(), strict=True):
            reported = dict(ours.top)
            reported[ours.token_id] = ours.logprob
            deltas.append(
                tuple(abs(reported[i] - value) for i, value in zip(ids, values, strict=True) if i in reported)
            )
        return cls(
            len(served.prompt),
            served.cached_tokens,
            served.token_ids,
            tuple(regrets),
            tuple(deltas),
            told.top_ids.shape[1],
        )

    @classmethod
    def of_rounding(cls, served: Served, narrow: torch.Tensor, wide: torch.Tensor) -> Compared:
        """The floor: the reference in its dtype against the same in a wider one, both ``[tokens, vocabulary]``."""
        told = Told.of(wide, narrow.argmax(-1).tolist())
        ids = torch.as_tensor(told.top_ids, device=narrow.device)
        found = narrow.gather(-1, ids).double().cpu().numpy()
        regrets = tuple((told.best - told.chosen).tolist())
        deltas = tuple(tuple(row) for row in abs(found - told.top).tolist())
        return cls(len(served.prompt), 0, served.token_ids, regrets, deltas, told.top_ids.shape[1])

    def as_json(self) -> dict[str, object]:
        """Compact, for the record: the deltas of a position by their mean, largest and number."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "token_ids": list(self.token_ids),
            "regret": [round(regret, DECIMALS) for regret in self.regrets],
            "mean": [round(sum(row) / max(len(row), 1), DECIMALS) for row in self.deltas],
            "max": [round(max(row, default=0.0), DECIMALS) for row in self.deltas],
            "shared": [len(row) for row in self.deltas],
        }


@frozen
class Figures:
    """What is held to bounds, over all positions of a pass.

    Attributes:
        sequences, positions: how many there are.
        regret: the largest.
        mean, p99: of the deltas; the percentile is a delta that occurred (nearest rank).
        largest: of the deltas. Printed, never held to a bound.
        shared: part of the reference's most probable tokens that the runtime reported.
    """

    sequences: int
    positions: int
    regret: float
    mean: float
    p99: float
    largest: float
    shared: float

    @classmethod
    def of(cls, compared: Sequence[Compared]) -> Figures:
        """Over all of `compared`; NaN where there is nothing."""
        regrets = [regret for one in compared for regret in one.regrets]
        deltas = sorted(delta for one in compared for row in one.deltas for delta in row)
        listed = sum(one.listed * len(one.deltas) for one in compared)
        if not regrets or not deltas:
            return cls(len(compared), len(regrets), *[math.nan] * 5)
        return cls(
            sequences=len(compared),
            positions=len(regrets),
            regret=max(regrets),
            mean=math.fsum(deltas) / len(deltas),
            p99=deltas[math.ceil(0.99 * len(deltas)) - 1],
            largest=deltas[-1],
            shared=len(deltas) / listed,
        )

    def as_json(self) -> dict[str, float | None]:
        """For the record; None where there is nothing, since JSON knows no NaN."""
        return {name: None if math.isnan(value) else value for name, value in asdict(self).items()}

    def as_floor(self) -> dict[str, float]:
        """By quantity, where these are the figures of rounding alone.

        A token is chosen wrongly where two log-probabilities are off together, which few positions show: the largest
        delta stands for the regret where it is more.
        """
        return {"regret": max(self.regret, self.largest), "mean": self.mean, "p99": self.p99}


def beyond(figures: Figures, bounds: Bounds) -> list[str]:
    """Each bound that the figures do not keep, with both numbers. NaN keeps none."""
    found = []
    for name in ("regret", "mean", "p99"):
        value, bound = getattr(figures, name), getattr(bounds, name)
        if not value <= bound:
            found.append(f"{name} {value:.4g} > {bound:.4g}")
    if not figures.shared >= bounds.shared:
        found.append(f"only {figures.shared:.0%} of the reference's most probable tokens are among the runtime's")
    return found
