"""A `Sampling` that cannot be served is refused when it is made, with the field named; torch is not needed."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.errors import RequestRejected
from trivet.sampling import Sampling, derive_seed
from trivet.sampling.params import STOP_CHARS_MAX

BAD = [
    ("max_new_tokens", [0, -1, 1.5, "3", True, 2**63]),
    ("temperature", [-0.1, math.nan, math.inf, -math.inf, "hot", None, True, 10**400]),
    ("top_k", [-1, 0.5, None, True]),
    ("top_p", [0, -0.5, 1.0001, math.nan, None]),
    ("min_p", [-0.01, 1.01, math.nan, None]),
    ("repetition_penalty", [0, -1.0, math.nan, math.inf]),
    ("presence_penalty", [math.nan, math.inf, -math.inf]),
    ("frequency_penalty", [math.nan, math.inf, -math.inf]),
    ("seed", [2**64, -(2**63) - 1, 1.0, "7", True]),
    ("stop", ["", ["a", ""], [1], 3, b"bytes", "s" * (STOP_CHARS_MAX + 1), ["stop"] * STOP_CHARS_MAX]),
    ("stop_token_ids", [[-1], ["1"], [True], 5, "12"]),
    ("ignore_eos", [1, None]),
    ("logprobs", [-1, 4097, 1.0, True]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD for value in values])
def test_a_value_that_cannot_be_served_is_refused_by_the_field_s_name(name: str, value: object) -> None:
    with pytest.raises(RequestRejected, match=rf"{name}.*found .*expected "):
        Sampling(**{name: value})  # type: ignore[arg-type]


def test_a_number_above_the_highest_is_refused_with_the_highest() -> None:
    with pytest.raises(RequestRejected, match=rf"max_new_tokens.*from 1 to {2**63 - 1}$"):
        Sampling(max_new_tokens=10**23)


def test_a_number_too_long_to_print_is_refused_all_the_same() -> None:
    with pytest.raises(RequestRejected, match=r"temperature.*too long to print"):
        Sampling(temperature=10**5000)


def test_defaults_are_those_of_the_contract() -> None:
    assert Sampling() == Sampling(
        max_new_tokens=16,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=None,
        stop=(),
        stop_token_ids=(),
        ignore_eos=False,
        logprobs=None,
    )


@given(st.text(min_size=1), st.lists(st.text(min_size=1)), st.lists(st.integers(0, 2**31)))
def test_stops_are_normalised_to_tuples(one: str, several: list[str], ids: list[int]) -> None:
    assert Sampling(stop=one).stop == (one,)
    assert Sampling(stop=several).stop == tuple(several)
    assert Sampling(stop_token_ids=ids).stop_token_ids == tuple(ids)


def test_what_a_request_needs_follows_from_its_fields() -> None:
    assert Sampling(top_k=5, top_p=0.5, min_p=0.1).greedy
    assert not Sampling(top_k=5, top_p=0.5, min_p=0.1).needs_ranking
    assert not Sampling(temperature=1, min_p=0.1).needs_ranking
    assert Sampling(temperature=1, top_p=0.5).needs_ranking
    assert not Sampling(temperature=1).needs_penalties
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert Sampling(**{name: 0.5}).needs_penalties  # type: ignore[arg-type]


def test_sampling_and_layouts_do_not_import_torch() -> None:
    code = "import sys, trivet.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@given(st.integers(0, 2**64), st.integers(0, 2**64))
def test_derived_seeds_differ_by_request_and_runtime_and_are_valid(runtime_seed: int, request: int) -> None:
    seed = derive_seed(runtime_seed, request)
    assert Sampling(seed=seed).seed == seed == derive_seed(runtime_seed, request)
    assert seed not in (derive_seed(runtime_seed, request + 1), derive_seed(runtime_seed + 1, request))
