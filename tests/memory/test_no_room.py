"""A device with less room than the budget supposes ends a load early, with the ledger and what to do; no other error of
the device is called that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.runtime.test_captured_steps import blueprint_of

import trivet
from trivet.layout import AllocationMeter, BufferLayout, Buffers, BufferSpec, NoRoom
from trivet.reservation import CONTEXT_LINE
from trivet.runtime import load
from trivet.runtime.blueprint import Blueprint

CUDA = torch.device("cuda", 0)
HELD_BYTES, UNUSED_BYTES = 5 * 2**30, 2**30
"""What torch's allocator holds of the device, and of that what nobody uses."""

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60.00 GiB")


def refused_by_torch(monkeypatch: pytest.MonkeyPatch, error: Exception, elements: int) -> None:
    """Let torch raise for buffers of this length."""
    empty = torch.empty

    def refusing(*sizes: Any, **settings: Any) -> torch.Tensor:
        if sizes == (elements,):
            raise error
        return empty(*sizes, **settings)

    monkeypatch.setattr(torch, "empty", refusing)


def buffer(elements: int, *, pinned: bool = False) -> BufferLayout:
    return BufferLayout("plan", [BufferSpec("pages", elements, "int32", pinned)])


def test_a_host_without_room_for_a_buffer_names_it() -> None:
    with pytest.raises(NoRoom, match=rf"cpu has no room for buffer 'pages' of layout 'plan' \({2**62} bytes\)"):
        buffer(2**60).allocate("cpu")


@pytest.mark.parametrize("pinned", [False, True])
def test_a_device_without_room_for_a_buffer_names_it(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = torch.AcceleratorError("CUDA error: out of memory")
    locked.error_code = 2  # type: ignore[attr-defined]
    refused_by_torch(monkeypatch, locked if pinned else FULL, 77)
    with pytest.raises(NoRoom, match=r"no room for buffer 'pages' .*out of memory"):
        buffer(77, pinned=pinned).allocate("cpu")


@pytest.mark.parametrize("code", [None, 700])
def test_another_error_of_a_device_stays_what_it_is(code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    if code is not None:
        broken.error_code = code  # type: ignore[attr-defined]
    refused_by_torch(monkeypatch, broken, 77)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        buffer(77).allocate("cpu")


@pytest.mark.parametrize("line", ["KV pages", "plan of the reference backend"])
def test_a_device_that_runs_out_while_loading_is_told_with_the_ledger_and_what_to_do(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = Buffers.allocate.__func__  # type: ignore[attr-defined]
    layouts: list[str] = []

    def refusing(cls: type[Buffers], layout: BufferLayout, *where: Any) -> Any:
        layouts.append(layout.name)
        # The first plan and the first pages are those of the profile.
        if layouts.count(layout.name) == (2 if line == "KV pages" else 1) and layout.name == found[line]:
            raise NoRoom(f"no room for {layout.name}")
        return allocate(cls, layout, *where)

    with trivet.Runtime.load("tiny-qwen3", device="cpu", autostart=False) as runtime:
        blueprint = runtime._engine.blueprint
        (plan,) = blueprint.plans.values()
        found = {"KV pages": blueprint.kv(1).name, "plan of the reference backend": plan.name}
    monkeypatch.setattr(Buffers, "allocate", classmethod(refusing))
    with pytest.raises(trivet.MemoryBudgetError, match="lower memory_fraction") as raised:
        trivet.Runtime.load("tiny-qwen3", device="cpu", autostart=False)
    text = str(raised.value)
    assert f"no room for {found[line]}" in text
    assert all(f"\n{item.name} " in text for item in blueprint.ledger.items)


class Allocated(Exception):
    """Something was allocated."""


@pytest.fixture
def load_where_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[Blueprint, int], None]:
    """Load on a CUDA device of which so many bytes are free; the first allocation raises `Allocated`."""

    def allocated(*args: object) -> Buffers:
        raise Allocated

    monkeypatch.setattr(load, "current", lambda device: nullcontext())
    monkeypatch.setattr(BufferLayout, "allocate", allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: HELD_BYTES)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: HELD_BYTES - UNUSED_BYTES)

    def loaded(blueprint: Blueprint, free_bytes: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, blueprint.ledger.budget_bytes))
        load.load_engine(blueprint, CUDA, AllocationMeter(), random_weights=True, seed=0)

    return loaded


@pytest.mark.parametrize("model", ["qwen3-14b", "qwen3.5-27b"])
def test_a_cuda_device_with_too_little_free_is_refused_before_anything_is_allocated(
    model: str, load_where_free: Callable[[Blueprint, int], None]
) -> None:
    blueprint = blueprint_of(model, "tuned")
    ledger = blueprint.ledger
    pinned_bytes = sum(spec.bytes for plan in blueprint.plans.values() for spec in plan.specs if spec.pinned)
    assert blueprint.pinned_bytes >= pinned_bytes > 0
    on_device = ledger.total_bytes - ledger.line(CONTEXT_LINE).bytes - blueprint.pinned_bytes
    with pytest.raises(Allocated):
        load_where_free(blueprint, on_device - UNUSED_BYTES)
    with pytest.raises(trivet.MemoryBudgetError, match="lower memory_fraction") as raised:
        load_where_free(blueprint, on_device - UNUSED_BYTES - 1)
    text = str(raised.value)
    assert "1.00 GiB held unused by torch" in text and ledger.table() in text
