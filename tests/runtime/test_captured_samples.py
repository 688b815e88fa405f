"""What a captured step sampled is read like any other, its padding rows left out."""

from __future__ import annotations

import torch

from trivet.runtime.graphs import CapturedSamples
from trivet.sampling.batch import SampleGroups
from trivet.sampling.logprobs import token_logprobs
from trivet.sampling.sampler import SampleResult


def test_tokens_flags_and_log_probabilities_are_those_of_the_rows() -> None:
    logits = torch.randn(4, 30)
    tokens, bad = logits.argmax(-1), torch.tensor([False, True, False, False])
    rows = torch.tensor([0, 2])
    groups = SampleGroups(scored_rows=rows, scored=((0, 3), (2, 1)))
    expected = SampleResult(tokens, bad, token_logprobs(logits, tokens[rows], 3, rows), groups)
    values = torch.cat((torch.cat((tokens, bad.long())), token_logprobs(logits, tokens, 5).packed().flatten()))
    captured = CapturedSamples(4, values, groups)
    assert captured.unpacked(captured.packed()).first(3) == expected.unpacked(expected.packed()).first(3)
