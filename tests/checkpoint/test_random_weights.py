"""Random weights depend on seed and name alone, and follow the draw that the weight map states."""

import math
from itertools import accumulate

import pytest
import torch

from trivet.dtypes import as_torch
from trivet.weights import random as random_weights
from trivet.weights.map import Initial, ParameterSpec, Part, WeightMap
from trivet.weights.random import fill_random

ROWS, COLUMNS = 300, 7


def _spec(name: str, initial: Initial, dtype: str | None = None) -> ParameterSpec:
    return ParameterSpec(name, (ROWS, COLUMNS), (Part(name, (ROWS, COLUMNS)),), dtype, initial)


SPECS = (
    _spec("projection", Initial.normal(0.02)),
    _spec("bias", Initial.uniform(-1.0, 0.0)),
    _spec("decay", Initial.log_uniform(1e-9, 0.05), "float32"),
    _spec("norm", Initial.near(1.0, 0.1)),
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for each parameter, the last one shorter."""
    monkeypatch.setattr(random_weights, "BLOCK_ELEMENTS", 512)


def _filled(specs: tuple[ParameterSpec, ...], seed: int, dtype: str = "float32") -> dict[str, torch.Tensor]:
    weight_map = WeightMap(specs)
    buffers = weight_map.layout(dtype).allocate("cpu")
    for spec in weight_map.parameters:
        buffers[spec.name].fill_(math.nan)
    pointers = buffers.pointers()
    parameters = fill_random(weight_map, buffers, seed)
    assert {name: parameter.data_ptr() for name, parameter in parameters.items()} == pointers
    return parameters


def test_a_seed_gives_the_same_weights_again() -> None:
    first, second = _filled(SPECS, 3), _filled(SPECS, 3)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_weights_depend_neither_on_order_nor_on_neighbours() -> None:
    together, reversed_order = _filled(SPECS, 3), _filled(SPECS[::-1], 3)
    for spec in SPECS:
        assert torch.equal(together[spec.name], reversed_order[spec.name])
        assert torch.equal(together[spec.name], _filled((spec,), 3)[spec.name])


def test_weights_do_not_depend_on_the_global_generator() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = _filled(SPECS, 3)["projection"]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(_filled(SPECS, 3)["projection"], first)


@pytest.mark.parametrize("seed", [-1, 4, 2**70])
def test_another_seed_gives_other_weights(seed: int) -> None:
    assert not torch.equal(_filled(SPECS, seed)["projection"], _filled(SPECS, 3)["projection"])


def test_another_name_and_another_block_give_other_weights() -> None:
    same_draw = (_spec("first", Initial.normal(1.0)), _spec("second", Initial.normal(1.0)))
    found = _filled(same_draw, 3)
    assert not torch.equal(found["first"], found["second"])
    assert found["first"].unique().numel() > 0.99 * ROWS * COLUMNS


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrower_dtype_holds_the_same_weights_rounded(dtype: str) -> None:
    wide, narrow = _filled(SPECS, 3), _filled(SPECS, 3, dtype)
    for spec in SPECS:
        expected = as_torch(spec.dtype or dtype)
        assert narrow[spec.name].dtype == expected
        assert torch.equal(narrow[spec.name], wide[spec.name].to(expected))


def test_progress_is_told_after_each_parameter_up_to_the_bytes_of_the_layout() -> None:
    weight_map = WeightMap(SPECS)
    layout = weight_map.layout("bfloat16")
    told: list[tuple[int, int]] = []
    found = fill_random(weight_map, layout.allocate("cpu"), 3, lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {layout.total_bytes}
    assert [done for done, _ in told] == list(accumulate(layout.spec(spec.name).bytes for spec in SPECS))
    silent = _filled(SPECS, 3, "bfloat16")
    assert all(torch.equal(found[name], silent[name]) for name in silent)


def test_a_normal_draw_has_its_deviation() -> None:
    values = _filled(SPECS, 3)["projection"]
    assert values.std().item() == pytest.approx(0.02, rel=0.1)
    assert abs(values.mean().item()) < 0.002


def test_an_even_draw_fills_its_bounds() -> None:
    values = _filled(SPECS, 3)["bias"]
    assert -1.0 <= values.min().item() < -0.98
    assert -0.02 < values.max().item() <= 0.0
    assert values.mean().item() == pytest.approx(-0.5, abs=0.03)


def test_a_logarithmic_draw_is_the_logarithm_of_an_even_one() -> None:
    values = _filled(SPECS, 3)["decay"]
    assert torch.isfinite(values).all()
    rates = values.exp()
    assert 0.0 < rates.min().item() < 0.001
    assert 0.049 < rates.max().item() <= 0.0501
    assert rates.mean().item() == pytest.approx(0.025, rel=0.1)


def test_a_constant_with_noise_stays_near_its_centre() -> None:
    values = _filled(SPECS, 3)["norm"]
    assert 0.9 <= values.min().item() < values.max().item() <= 1.1
    assert torch.equal(_filled((_spec("one", Initial.near(1.0, 0.0)),), 3)["one"], torch.ones(ROWS, COLUMNS))
