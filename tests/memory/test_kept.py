"""A model keeps next to nothing beside the parameters that it is given, since the memory ledger would not count it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import make_qwen3

import trivet
from trivet.layers.parameters import Parameters
from trivet.plugin.family import ModelFamily

LIMITS = trivet.Limits(max_requests=2, max_step_tokens=16, max_context=32, page_size=4)


@pytest.fixture
def load_keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[torch.Tensor], object]], None]:
    """Load a model whose build keeps something of every parameter."""
    make_qwen3(tmp_path)
    right = ModelFamily.builder

    def load(keep: Callable[[torch.Tensor], object]) -> None:
        def builder(family: ModelFamily) -> Callable[..., Any]:
            def build(geometry: Any, parameters: Parameters) -> Any:
                model = right(family)(geometry, parameters)
                model.kept = [keep(tensor) for tensor in parameters._tensors.values()]
                return model

            return build

        monkeypatch.setattr(ModelFamily, "builder", builder)
        trivet.Runtime.load(tmp_path, device="cpu", limits=LIMITS, autostart=False).close()

    return load


def test_copies_of_weights_are_refused_with_what_they_take(load_keeping: Callable[..., None]) -> None:
    for copy in (torch.clone, torch.Tensor.double, lambda weight: torch.cat((weight, weight))):
        with pytest.raises(
            trivet.PluginError, match=r"family 'qwen3': its build keeps .* which the memory ledger does"
        ):
            load_keeping(copy)


def test_views_other_forms_of_vectors_and_what_is_let_go_are_not(load_keeping: Callable[..., None]) -> None:
    load_keeping(lambda weight: weight.t() if weight.dim() == 2 else weight.float() + 1)
    load_keeping(lambda weight: float(weight.double().sum()))
