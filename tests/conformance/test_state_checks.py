"""What checks of recurrent states make of states that are wrong throughout."""

from __future__ import annotations

import pytest
import torch

from trivet.conformance import Asked, Broken, Kit
from trivet.conformance.checks import state
from trivet.conformance.served import Served


def test_a_state_that_stays_zero_is_named_though_nothing_can_be_measured_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read = state._states

    def zeros(served: Served, slot: int) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(tensor) for name, tensor in read(served, slot).items()}

    monkeypatch.setattr(state, "_states", zeros)
    told = r"its largest entry is 0; expected .* not zero"
    with Kit(Asked("qwen3_5_text")) as kit, pytest.raises(Broken, match=told):
        state.carried_between_steps.run(kit.benches["cpu"])
