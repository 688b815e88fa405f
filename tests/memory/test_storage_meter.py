"""What operations make is counted, whatever lay at its address before, and given back when it is gone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trivet.runtime.meter import StorageMeter
from trivet.runtime.step_meter import StepMeter


@pytest.mark.parametrize("elements", [256, 2**12, 2**18])
def test_results_at_addresses_that_were_others_before_are_counted(elements: int) -> None:
    kept = []
    with StorageMeter() as meter:
        for _ in range(50):
            borrowed = torch.from_numpy(np.zeros(elements, dtype=np.int64))
            doubled = borrowed * 2
            del borrowed, doubled
            kept.append(torch.ones(2 * elements))
    assert meter.live_bytes == sum(tensor.nbytes for tensor in kept)


def test_views_and_what_was_there_before_are_not_counted() -> None:
    before = torch.zeros(100)
    with StorageMeter() as meter:
        made = before + 1
        parts = made[:50], before[50:], made.view(10, 10)
        before.add_(1)
        assert meter.live_bytes == made.nbytes
        del made
        assert meter.live_bytes == 400, "a view keeps all of its storage"
        del parts
    assert meter.live_bytes == 0 and meter.peak_bytes == 400


def test_what_attention_takes_and_keeps_is_told_from_what_layers_do() -> None:
    index: list[torch.Tensor] = []

    def attend() -> torch.Tensor:
        scratch = torch.zeros(300)
        if not index:
            index.append(torch.zeros(200))
        return scratch[:50] + 1

    with StepMeter() as meter:
        meter.begin_forward()
        stream = torch.zeros(100)
        for _ in range(3):
            stream = stream + meter.attention(attend)[:1]
        meter.end_forward()
        logits = stream.repeat(8)
        meter.end()
    assert meter.attention_bytes == 4 * (300 + 200)
    assert meter.layers_bytes == 4 * (100 + 100 + 50)
    assert meter.forward_bytes == 4 * (100 + 200 + 300 + 50)
    assert meter.sampling_bytes == 4 * (100 + 200) + logits.nbytes


@pytest.mark.parametrize("place", ["a buffer", "the query"])
def test_a_result_that_attention_did_not_make_is_no_less_of_it_in_any_layer(place: str) -> None:
    buffer = torch.zeros(100)

    def attend(query: torch.Tensor) -> torch.Tensor:
        scratch = torch.zeros(300)
        return (buffer if place == "a buffer" else query).copy_(scratch[:100])

    with StepMeter() as meter:
        meter.begin_forward()
        for _ in range(20):
            query = torch.zeros(100)
            meter.attention(lambda query=query: attend(query))  # type: ignore[misc]
            del query
        meter.end_forward()
    assert meter.attention_bytes == 4 * 300
    assert meter.layers_bytes <= 2 * 4 * 100
    assert meter.forward_bytes == meter.layers_bytes + 4 * 300
