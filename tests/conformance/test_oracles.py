"""What the shipped families are held against is what transformers says today."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.projects import around_qwen3
from tests.conformance.store_oracles import reference

import trivet_qwen3
from trivet.conformance import CHECKS, Asked, Broken, Kit, Outcome
from trivet.conformance.oracle import PROBE_TOKENS, tensor_groups, without_group
from trivet.conformance.tiny import make_tiny

ATOL = 2e-5


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_text", "qwen3_5"])
def test_stored_log_probabilities_are_those_of_transformers(model_type: str) -> None:
    with Kit(Asked(model_type)) as kit:
        bench = kit.benches["cpu"]
        for tiny in bench.tinies:
            for sequence in bench.oracle.sequences(tiny):
                logits = reference(tiny.config, tiny.tensors, sequence.tokens)
                expected = torch.log_softmax(logits.double(), dim=-1).float()
                torch.testing.assert_close(sequence.logprobs, expected, atol=ATOL, rtol=0)
            group = sorted(tensor_groups(tiny.tensors))[0]
            probe = bench.oracle.sequences(tiny)[0].tokens[:PROBE_TOKENS]
            logits = reference(tiny.config, without_group(tiny.tensors, group), probe)
            expected = torch.log_softmax(logits.double(), dim=-1).float()
            torch.testing.assert_close(bench.oracle.without(tiny, group), expected, atol=ATOL, rtol=0)


def test_weights_other_than_those_that_were_stored_are_told_from_a_wrong_model(tmp_path: Path) -> None:
    with Kit(Asked("qwen3")) as kit:
        bench = kit.benches["cpu"]
        tiny = bench.tiny()
        scaled = {name: tensor * 1.01 for name, tensor in tiny.tensors.items()}
        other = make_tiny(bench.family, tiny.name, tiny.config, tmp_path, scaled)
        with pytest.raises(Broken, match="store the log-probabilities again"):
            bench.oracle.sequences(other)


def prefill_of(model_type: str) -> Outcome:
    with Kit(Asked(model_type)) as kit:
        return kit.run(next(check for check in CHECKS if check.id == "numerics.prefill/1"))


def rewritten(to: Path, entry: Mapping[str, Any]) -> None:
    """Qwen3's stored oracle with each config's entry changed, a None taken out."""
    from safetensors import safe_open
    from safetensors.torch import save

    with safe_open(Path(trivet_qwen3.__file__).with_name("oracle.safetensors"), framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        about = json.loads(opened.metadata()["trivet"])
    for name, told in about["configs"].items():
        about["configs"][name] = {k: v for k, v in {**told, **entry}.items() if v is not None}
    to.write_bytes(save(tensors, metadata={"trivet": json.dumps(about)}))


CHANGED = """
FAMILY = attrs.evolve(
    FAMILY, tiny_configs={{k: {{**v, {change}}} for k, v in FAMILY.tiny_configs.items()}}
)
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [("'rms_norm_eps': 0.5", "rms_norm_eps is 0.5, was "), ("'unread': [1]", "unread is [1], was absent")],
)
def test_a_config_that_was_changed_since_is_named_by_its_key_and_no_model_is_blamed(
    change: str, said: str, tmp_path: Path
) -> None:
    name = "changed" + change[1:5]
    with around_qwen3(tmp_path, name, source=CHANGED.format(change=change)):
        failure = prefill_of(name).failure
    assert failure is not None
    assert said in failure.observed and "model_type" not in failure.observed
    assert failure.cause.startswith("the tiny config was changed") and "store_logprobs" in failure.cause


def test_the_same_config_under_another_model_type_is_the_same(tmp_path: Path) -> None:
    with around_qwen3(tmp_path, "renamed"):
        assert prefill_of("renamed").status == "passed"


def test_a_file_from_before_configs_were_kept_asks_to_be_stored_again(tmp_path: Path) -> None:
    rewritten(tmp_path / "older_plugin.safetensors", {"config": None})
    (tmp_path / "older_data").mkdir()
    (tmp_path / "older_data" / "__init__.py").touch()
    (tmp_path / "older_plugin.safetensors").rename(tmp_path / "older_data" / "old.safetensors")
    changes = "oracle=trivet.plugin.StoredOracle('older_data:old.safetensors'),"
    with around_qwen3(tmp_path, "older", changes.replace("trivet.plugin.", "__import__('trivet.plugin').plugin.")):
        failure = prefill_of("older").failure
    assert failure is not None and "does not say which config" in failure.observed
    assert "store the log-probabilities again" in failure.cause


@pytest.mark.parametrize("file", ["trivet_qwen3:nowhere.safetensors", "trivet_nowhere:oracle.safetensors"])
def test_a_stored_oracle_that_is_missing_is_no_oracle_and_not_a_wrong_model(file: str, tmp_path: Path) -> None:
    name = "missing" + file[7]
    changes = f"oracle=__import__('trivet.plugin').plugin.StoredOracle({file!r}),"
    with around_qwen3(tmp_path, name, changes):
        found = prefill_of(name)
    assert found.status == "not run" and found.reason is not None
    assert "there is no oracle" in found.reason and file in found.reason


def test_a_stored_oracle_that_cannot_be_read_is_blamed_on_the_file(tmp_path: Path) -> None:
    changes = "oracle=__import__('trivet.plugin').plugin.StoredOracle('trivet_qwen3:model.py'),"
    with around_qwen3(tmp_path, "unreadable", changes):
        failure = prefill_of("unreadable").failure
    assert failure is not None and "cannot be read" in failure.observed and "the file is damaged" in failure.cause
