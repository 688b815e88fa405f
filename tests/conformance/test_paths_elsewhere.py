"""Checks of decode paths ask for what the bench serves, on a device too, and installed backends are among the paths."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest
import torch

from trivet.attention.batch import StepBatch
from trivet.attention.protocol import PathRequest, PlanOwner, Replan, Verdict
from trivet.attention.reference.owner import ReferenceOwner
from trivet.attention.reference.path import ReferencePath
from trivet.capacity import PlanCapacity
from trivet.conformance import Asked, Broken, Kit
from trivet.conformance.bench import Bench
from trivet.conformance.checks import device, plan
from trivet.layout import Buffers
from trivet.plugin import AttentionBackend, hookimpl
from trivet.plugin.manager import PluginManager

REPEATED = {
    check.id: check
    for check in (
        device.device_plan_no_allocation,
        device.device_plan_pointers_stable,
        device.device_plan_refuses_what_is_too_large,
        device.device_attention,
    )
}


class HalfOwner(ReferenceOwner):
    """An owner of a path that serves bfloat16 alone."""

    def __init__(self, capacity: PlanCapacity, buffers: Buffers) -> None:
        assert capacity.dtype == "bfloat16" and capacity.device is not None
        super().__init__(capacity, buffers)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """As the reference."""
        assert {tensor.dtype for tensor in (query, keys, values)} == {torch.bfloat16}
        return super().attend(query, keys, values)


class Kept(HalfOwner):
    """Updates into new buffers."""

    def update(self, batch: StepBatch) -> Replan:
        """As the reference, elsewhere."""
        self.buffers._tensors["positions"] = torch.zeros_like(self.buffers["positions"])
        self._views["positions"] = self.buffers["positions"].numpy()
        return super().update(batch)


class FirstRowAlone(HalfOwner):
    """Takes every decode row for the first one."""

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Wrong where there are two of them."""
        out = super().attend(query, keys, values)
        out[: self.decodes] = out[:1].clone()
        return out

    def update(self, batch: StepBatch) -> Replan:
        """As the reference."""
        replan = super().update(batch)
        self.decodes = batch.decode_rows
        return replan


@attrs.frozen
class HalfPath(ReferencePath):
    """A path of an installed backend, for bfloat16 under the pinned policy."""

    owner: type[HalfOwner] = HalfOwner

    @property
    def name(self) -> str:
        """``"half"``."""
        return "half"

    @property
    def backend(self) -> str:
        """``"mine"``."""
        return "mine"

    def usable(self, need: PathRequest) -> Verdict:
        """Nothing else."""
        return Verdict(need.dtype == "bfloat16" and need.numeric_policy == "pinned", "it is made for bfloat16")

    def bind(self, capacity: PlanCapacity, buffers: Buffers) -> PlanOwner:
        """An owner as asked for."""
        return self.owner(capacity, buffers)


class RaisingPath(HalfPath):
    """A path whose predicate fails."""

    def usable(self, need: PathRequest) -> Verdict:
        """Never gets so far."""
        raise ZeroDivisionError("the device has no warps")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Serve bfloat16 on the CPU, as on a device; path and owner of each binding."""
    monkeypatch.setattr(Bench, "dtype", "bfloat16")
    found: list[tuple[str, str]] = []
    bind = ReferencePath.bind

    def noted(self: ReferencePath, capacity: PlanCapacity, buffers: Buffers) -> PlanOwner:
        found.append((self.name, str(capacity.dtype)))
        return bind(self, capacity, buffers)

    monkeypatch.setattr(ReferencePath, "bind", noted)
    yield found


def kit_with(monkeypatch: pytest.MonkeyPatch, path: HalfPath) -> Kit:
    """A kit of Qwen3 where a backend of `path` is installed."""

    class Plugin:
        @hookimpl
        def trivet_attention_backends(self) -> list[AttentionBackend]:
            return [AttentionBackend(name="mine", decode_paths=(path,))]

    import trivet_qwen3

    manager = PluginManager.of(families={"qwen3": trivet_qwen3.plugin}, backends={"mine": Plugin()})
    monkeypatch.setattr(PluginManager, "discover", lambda *_, **__: manager)
    return Kit(Asked("qwen3"))


@pytest.mark.parametrize("id", REPEATED)
def test_the_paths_of_a_device_are_asked_in_its_dtype_and_pass(
    id: str, asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with kit_with(monkeypatch, HalfPath()) as kit:
        REPEATED[id].run(kit.benches["cpu"])
    assert set(asked) == {("reference", "bfloat16")}


@pytest.mark.parametrize(
    ("id", "owner", "says"),
    [
        ("device.plan-no-allocation/1", Kept, "path 'half': update allocated"),
        ("device.plan-pointers-stable/1", Kept, "path 'half'.*positions.* lie elsewhere"),
        ("device.attention/1", FirstRowAlone, "path 'half'.* off by"),
    ],
)
def test_what_an_installed_backend_gets_wrong_is_found(
    id: str, owner: type[HalfOwner], says: str, asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with kit_with(monkeypatch, HalfPath(owner=owner)) as kit, pytest.raises(Broken, match=says):
        REPEATED[id].run(kit.benches["cpu"])


def test_an_installed_path_whose_predicate_raises_is_passed_over_and_named_by_the_check_of_verdicts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with kit_with(monkeypatch, RaisingPath()) as kit:
        bench = kit.benches["cpu"]
        (attention,) = bench.tiny().geometry.attention_geometries
        assert [path.name for path in bench.usable_paths(attention)] == ["reference"]
        outcome = kit._outcome(plan.verdicts)
    assert outcome.failure is not None
    assert "the device has no warps" in outcome.failure.text() and "predicate raises" in outcome.failure.text()


def test_each_plan_check_of_a_device_repeats_one_of_the_cpu() -> None:
    from trivet.conformance import CHECKS

    contracts = {check.contract for check in CHECKS if check.tier in ("protocol", "numerics")}
    assert {check.contract for check in REPEATED.values()} <= contracts
    assert all(check in CHECKS and check.tier == "device" for check in REPEATED.values())
