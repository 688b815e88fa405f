"""What the shipped families are held against is what transformers says today."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conformance.store_oracles import reference

from trivet.conformance import Asked, Broken, Kit
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
