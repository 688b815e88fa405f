"""Nothing stays alive that nobody can use: not behind an error that is kept, not behind a closed runtime."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.runtimes import assert_at_rest

import trivet
from trivet.runtime import load

LIMITS = trivet.Limits(max_requests=2, max_step_tokens=8, max_context=64, page_size=4)


def live_storages() -> set[int]:
    """Addresses of the storages under every tensor that is alive."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_a_closed_runtime_that_somebody_holds_keeps_no_buffer_alive(family_checkpoint: Path) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS) as runtime:
        runtime.generate([[1, 2, 3]], trivet.Sampling(max_new_tokens=3))
        owned = {
            address: f"{line}: {name}"
            for line, buffers in runtime._engine.owned.items()
            for name, address in buffers.pointers().items()
            if address
        }
        assert owned.keys() <= live_storages()
    kept = owned.keys() & live_storages()
    assert not kept, [owned[address] for address in kept]


def test_an_error_that_is_kept_keeps_no_tensor_of_its_step(
    family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporaries: list[weakref.ref[torch.Tensor]] = []
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, autostart=False) as runtime:

        def failing(*args: Any) -> torch.Tensor:
            hidden = torch.zeros(1000)
            temporaries.append(weakref.ref(hidden))
            try:
                raise ValueError("first")
            except ValueError:
                raise MemoryError("injected")  # noqa: B904 (an implicit context is what has to be released too)

        monkeypatch.setattr(runtime._engine.model, "logits", failing)
        completion = runtime.generate([[1, 2, 3]])[0]
        assert isinstance(completion.error, MemoryError)
        assert [tensor() for tensor in temporaries] == [None]
        assert_at_rest(runtime)


def test_the_error_of_a_failed_load_keeps_no_tensor(family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[weakref.ref[torch.Tensor]] = []

    def failing(capacity: Any, selections: Any, model: Any, *args: Any) -> None:
        weights.append(weakref.ref(model.embedding_weight))
        raise trivet.PluginError("injected")

    monkeypatch.setattr(load, "run_profile", failing)
    with pytest.raises(trivet.PluginError, match="injected") as raised:
        trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS)
    assert raised.value.__traceback__ is not None
    assert weights[0]() is None


def test_closing_releases_the_rest_though_an_owner_fails_to_close(
    family_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS)
    engine = runtime._engine

    def failing() -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(next(iter(engine.owners.values())), "close", failing)
    with pytest.raises(RuntimeError, match="lost"):
        runtime.close()
    assert all(buffers.storage_bytes == 0 for buffers in engine.owned.values())
    runtime.close()
