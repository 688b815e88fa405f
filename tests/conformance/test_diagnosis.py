"""A failure of the numbers names the fault, once: of a model that is wrong in a known way, the cause says in which."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.conformance.projects import around_qwen3

from trivet.conformance import CHECKS, Asked, Kit
from trivet.conformance.checks import isolation
from trivet.conformance.served import Served

BENT = """
def bent(geometry, parameters):
    import torch
    from trivet_qwen3.model import build

    class Moved:
        def __init__(self, norm):
            self.norm = norm

        def __call__(self, hidden):
            return self.norm(hidden) - self.norm(hidden) / self.norm.weight

    def after(call, change):
        return lambda hidden, *rest, **named: change(call(hidden, *rest, **named))

    def before(call, change):
        return lambda hidden, *rest, **named: call(change(hidden), *rest, **named)

    model = build(geometry, parameters)
    {fault}
    return model
"""

EARLIER_LAYERS = "for layer in model.layers: layer.mlp = before(layer.mlp, lambda x: {change})"


@contextmanager
def bent(folder: Path, fault: str) -> Iterator[Kit]:
    """The kit of a family like Qwen3 whose model has a fault, named after the folder that it lies in."""
    name = folder.name
    with (
        around_qwen3(folder, name, f"build='{name}_plugin:bent',", BENT.format(fault=fault)),
        Kit(Asked(name)) as kit,
    ):
        yield kit


def cause_of(kit: Kit, id: str) -> str:
    outcome = kit._outcome(next(check for check in CHECKS if check.id == id))
    assert outcome.failure is not None, f"{id} {outcome.status}"
    return outcome.failure.cause


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "for layer in model.layers: layer.mlp_norm.zero_centred = True",
            "1 taken from post_attention_layernorm: do not pass",
        ),
        ("model.norm.zero_centred = True", "1 taken from model.norm: do not pass"),
        (
            "for layer in model.layers: layer.mlp_norm = Moved(layer.mlp_norm)",
            "1 added to post_attention_layernorm: pass",
        ),
        (
            "for layer in model.layers: layer.mlp_norm.zero_centred = layer.attention_norm.zero_centred = True",
            "1 taken from input_layernorm, post_attention_layernorm: do not pass",
        ),
    ],
    ids=["one norm", "the final norm", "the other way", "two norms"],
)
def test_a_norm_that_is_centred_wrongly_is_named_with_the_cure(fault: str, said: str, tmp_path: Path) -> None:
    with bent(tmp_path, fault) as kit:
        cause = cause_of(kit, "numerics.prefill/1")
    assert f"it is right with {said} zero_centred=True" in cause
    assert "stays wrong" not in cause


@pytest.mark.parametrize("change", ["2 * (x / 2).tanh()", "1.25 * x"])
def test_logits_that_are_right_up_to_a_monotone_map_are_told_so(change: str, tmp_path: Path) -> None:
    with bent(tmp_path, f"model.logits = after(model.logits, lambda x: {change})") as kit:
        cause = cause_of(kit, "numerics.prefill/1")
    assert "monotone map" in cause and "softcap" in cause and "not the layers" in cause


def test_a_wrong_mlp_is_neither_called_a_norm_nor_a_softcap(tmp_path: Path) -> None:
    with bent(tmp_path, EARLIER_LAYERS.format(change="x + x * x / 50")) as kit:
        cause = cause_of(kit, "numerics.prefill/1")
    assert cause.startswith("the MLP") and "behind it" in cause
    assert "monotone" not in cause and "zero_centred=True" not in cause
    stays = cause.partition("it stays wrong without ")[2]
    assert "self_attn.o_proj" in stays and "norm" not in stays  # leaving a norm out clears it of nothing


AFTER_PREFILL = ["decode", "chunked", "mixed", "batched", "warm", "page-sizes"]


@pytest.mark.parametrize("name", AFTER_PREFILL)
def test_where_a_whole_prompt_is_wrong_no_other_cause_is_made_up(name: str, tmp_path: Path) -> None:
    with bent(tmp_path, EARLIER_LAYERS.format(change="x * 1.1")) as kit:
        cause = cause_of(kit, f"numerics.{name}/1")
    assert re.match(r"the same as numerics\.prefill, mend that first: .* off by [\d.e-]+ nat already$", cause)


def test_where_a_whole_prompt_is_right_the_cause_is_that_of_the_check(tmp_path: Path) -> None:
    with bent(tmp_path, EARLIER_LAYERS.format(change="x * 1.1 if len(x) == 1 else x")) as kit:
        assert cause_of(kit, "numerics.decode/1").startswith("decode computes otherwise than prefill")
        cold = cause_of(kit, "numerics.warm/1")
    assert cold.startswith("not the prefix cache") and "numerics.decode" in cold


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (EARLIER_LAYERS.format(change="x + 1e-3 * x.mean(0)"), "a layer mixes rows"),
        (EARLIER_LAYERS.format(change="x + 1e-2 * x.roll(1, 0)"), "a layer mixes rows"),
        (EARLIER_LAYERS.format(change="x * (1 + 1e-3 * (len(x) == 1))"), "depends on its place in the step"),
    ],
    ids=["a mean over tokens", "a shift of tokens", "the number of rows"],
)
def test_a_layer_that_mixes_rows_is_found_before_sampling_is_blamed(fault: str, said: str, tmp_path: Path) -> None:
    ids = [check.id for check in CHECKS]
    assert ids.index("isolation.rows-do-not-mix/1") < min(i for i, id in enumerate(ids) if id.startswith("sampling."))
    with bent(tmp_path, fault) as kit:
        assert said in cause_of(kit, "isolation.rows-do-not-mix/1")


def test_poison_that_moves_only_log_probabilities_is_told_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(served: Served) -> None:
        served.engine.owned["weights"]["norm.weight"].mul_(1 + 1e-5)

    monkeypatch.setattr(isolation, "_poison", move)
    with Kit(Asked("qwen3")) as kit:
        outcome = kit._outcome(next(check for check in CHECKS if check.id == "isolation.poison-is-not-read/1"))
    assert outcome.failure is not None
    assert re.search(
        r"the same tokens, with log-probabilities that differ by up to [\d.e-]+ nat", outcome.failure.observed
    )
