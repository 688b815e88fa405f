"""What a load asks a CUDA device, it asks the one that the runtime is to live on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tests.support.runtimes import make_checkpoint

import trivet
from trivet.capacity import DeviceProfile
from trivet.runtime import runtime, warmup

SECOND = torch.device("cuda", 1)


class Asked(Exception):
    """The device was asked."""


@pytest.mark.parametrize("module", [runtime, warmup], ids=["load", "warm up"])
def test_paths_are_chosen_with_the_runtime_s_device_as_the_current_one(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def entering(device: torch.device) -> Iterator[None]:
        entered.append(device)
        try:
            yield
        finally:
            entered.pop()

    def draw(*args: object) -> None:
        assert entered == [SECOND]
        raise Asked

    here = attrs.evolve(DeviceProfile.named("h200"), present=True)
    monkeypatch.setattr(module, "resolve_device", lambda device: (SECOND, here))
    monkeypatch.setattr(module, "draw_blueprint", draw)
    monkeypatch.setattr(torch.cuda, "device", entering)
    checkpoint = make_checkpoint("qwen3", tmp_path)
    with pytest.raises(Asked):
        if module is runtime:
            trivet.Runtime.load(checkpoint, device="cuda:1")
        else:
            warmup.warm_up(checkpoint, lambda line: None, device="cuda:1")
    assert entered == []
