"""The gate's figures and bounds: what they are made of, and that none can be loosened by hand or by NaN."""

from __future__ import annotations

import math

import pytest
import torch

from trivet.gate.bounds import DOCUMENTED, QUANTITIES, Bounds, bounds_of, entries
from trivet.gate.compare import Compared, Figures, beyond
from trivet.gate.reference import Told
from trivet.gate.session import Served
from trivet.sampling.logprobs import TokenLogprob

BOUNDS = Bounds(regret=0.2, mean=0.06, p99=0.2)


def served(*logprobs: TokenLogprob) -> Served:
    return Served((1, 2), tuple(one.token_id for one in logprobs), logprobs, 0)


def figures(**changes: float) -> Figures:
    values = {"regret": 0.1, "mean": 0.05, "p99": 0.1, "largest": 9.0, "shared": 0.9} | changes
    return Figures(sequences=1, positions=1, **values)  # type: ignore[arg-type]


def test_regret_is_against_the_best_and_deltas_are_over_what_both_report() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    ours = TokenLogprob(1, math.log(0.3), ((1, math.log(0.3)), (0, math.log(0.4))))
    compared = Compared.of(served(ours), Told.of(reference, [1]))
    assert compared.regrets[0] == pytest.approx(math.log(2))
    assert sorted(compared.deltas[0]) == pytest.approx(sorted((math.log(0.5 / 0.4), math.log(0.3 / 0.25))), abs=1e-6)
    assert Figures.of([compared]).shared == 0.5


def test_the_floor_takes_the_narrow_reference_for_the_runtime() -> None:
    wide = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    narrow = wide + torch.tensor([[-0.8, 0.0, 0.0]])
    floor = Figures.of([Compared.of_rounding(served(TokenLogprob(0, 0.0)), narrow, wide)])
    assert floor.regret == pytest.approx(math.log(2)) and floor.largest == pytest.approx(0.8)
    assert floor.as_floor() == {"regret": pytest.approx(0.8), "mean": pytest.approx(0.8 / 3), "p99": floor.p99}


@pytest.mark.parametrize("name", QUANTITIES)
def test_each_figure_has_its_own_bound_and_the_largest_difference_has_none(name: str) -> None:
    assert beyond(figures(), BOUNDS) == []
    (found,) = beyond(figures(**{name: 0.3}), BOUNDS)
    assert found.startswith(name)
    (found,) = beyond(figures(**{name: math.nan}), BOUNDS)
    assert found.startswith(name)


def test_too_few_common_tokens_are_beyond() -> None:
    (found,) = beyond(figures(shared=0.4), BOUNDS)
    assert "40%" in found


def test_nothing_compared_keeps_no_bound() -> None:
    assert len(beyond(Figures.of([]), BOUNDS)) == 4


def test_the_bounds_are_those_that_were_measured() -> None:
    assert len(entries()) == len({(entry.dtype, entry.quantity) for entry in entries()}) == 6
    for entry in entries():
        assert entry.digest == entry.own_digest, f"{entry.dtype} {entry.quantity} was changed by hand"
        assert 1.0 < entry.multiple <= 20.0 and len(entry.samples) >= 2
        if entry.dtype == "bfloat16":
            assert entry.figure == DOCUMENTED[entry.quantity] and entry.multiple <= 2.0
        else:
            assert entry.figure == pytest.approx(max(1e-4, entry.multiple * max(entry.samples.values())), rel=1e-3)


def test_a_models_own_floor_raises_a_bound_and_never_lowers_one() -> None:
    assert bounds_of("bfloat16") == bounds_of("float16") == Bounds(**DOCUMENTED)
    assert bounds_of("bfloat16", {"mean": 0.001}).mean == 0.06
    assert bounds_of("bfloat16", {"mean": 0.05}).mean == pytest.approx(0.1)
    assert bounds_of("bfloat16", {"mean": math.nan}).mean == 0.06
