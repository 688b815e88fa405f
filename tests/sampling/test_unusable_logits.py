"""A row whose logits are unusable is flagged, and changes nothing for the others."""

import math

import pytest
import torch

from trivet.sampling import Sampling

REQUESTS = [
    Sampling(logprobs=2),
    Sampling(temperature=1.0, logprobs=2),
    Sampling(temperature=1.0, top_k=4),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.2, frequency_penalty=0.3),
    Sampling(frequency_penalty=0.3),
]


def spoilt(row: torch.Tensor, how: str) -> torch.Tensor:
    row = row.clone()
    if how == "one NaN":
        row[11] = torch.nan
    elif how == "all NaN":
        row[:] = torch.nan
    elif how == "nothing finite":
        row[:] = -torch.inf
    else:
        row[3] = torch.inf
    return row


@pytest.mark.parametrize("general", [False, True], ids=["by group", "any group"])
@pytest.mark.parametrize("how", ["one NaN", "all NaN", "nothing finite", "infinite"])
@pytest.mark.parametrize("victim", range(len(REQUESTS)))
def test_an_unusable_row_is_flagged_and_harms_no_other(sample_rows, victim: int, how: str, general: bool) -> None:
    rows = len(REQUESTS)
    logits = torch.randn(rows, 400)
    outputs = [[5, 6, 7]] * rows
    clean = sample_rows(logits, REQUESTS, outputs=outputs, general=general)
    assert clean.bad == [False] * rows
    logits[victim] = spoilt(logits[victim], how)
    result = sample_rows(logits, REQUESTS, outputs=outputs, general=general)
    assert result.bad == [row == victim for row in range(rows)]
    assert result.token_ids[victim] == 0
    for row in set(range(rows)) - {victim}:
        assert result.token_ids[row] == clean.token_ids[row]
        assert result.logprobs[row] == clean.logprobs[row]


def test_tokens_ruled_out_by_minus_infinity_do_not_make_a_row_unusable(sample_rows) -> None:
    logits = torch.full((len(REQUESTS), 50), -math.inf)
    logits[:, 9] = 1.0
    result = sample_rows(logits, REQUESTS)
    assert result.bad == [False] * len(REQUESTS)
    assert result.token_ids == [9] * len(REQUESTS)
