"""Two ways to a plan for each step: refill the one that is owned, or allocate a fresh one.

Both are plan owners that stand in for the engine's own, so that everything else of the step is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from trivet.attention import DecodePath, PlanOwner, Replan, StepBatch
from trivet.capacity import PlanCapacity
from trivet.layout import AllocationMeter, Buffers

if TYPE_CHECKING:
    import torch

    from trivet.runtime.engine import Engine

ArmName = Literal["owned", "fresh"]
ARMS: tuple[ArmName, ...] = ("owned", "fresh")


@runtime_checkable
class LikeOwner(Protocol):
    """What a plan owner may offer beside `PlanOwner`, so that a fresh plan costs what a fresh plan must."""

    def like(self, buffers: Buffers) -> PlanOwner:
        """A like owner over other buffers of the same layout: nothing is loaded, warmed up or checked again."""


class OwnedPlan:
    """The engine's own owner, with the CPU time of each update, and what it allocates where that is counted.

    Attributes:
        update_ms: CPU time that the stepping thread spent in each update.
        allocated: reads how many allocations there have been; None while nothing is counted, as in timed steps.
        allocations: made during each update that was counted.
    """

    def __init__(self, owner: PlanOwner) -> None:
        self.owner = owner
        self.update_ms: list[float] = []
        self.allocated: Callable[[], int] | None = None
        self.allocations: list[int] = []

    @property
    def capacity(self) -> PlanCapacity:
        """See `PlanOwner.capacity`."""
        return self.owner.capacity

    @property
    def buffers(self) -> Buffers:
        """See `PlanOwner.buffers`."""
        return self.owner.buffers

    @property
    def positions(self) -> torch.Tensor:
        """See `PlanOwner.positions`."""
        return self.owner.positions

    def update(self, batch: StepBatch) -> Replan:
        """See `PlanOwner.update`."""
        before = self.allocated() if self.allocated is not None else 0
        started = time.thread_time()
        replan = self._replan(batch)
        self.update_ms.append((time.thread_time() - started) * 1e3)
        if self.allocated is not None:
            self.allocations.append(self.allocated() - before)
        return replan

    def append(self, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `PlanOwner.append`."""
        self.owner.append(key, value, keys, values)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See `PlanOwner.attend`."""
        return self.owner.attend(query, keys, values)

    def close(self) -> None:
        """Leaves the engine's own owner open."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.owner, name)

    def _replan(self, batch: StepBatch) -> Replan:
        return self.owner.update(batch)


class FreshPlan(OwnedPlan):
    """Frees the plan of the step before, allocates a new one, and fills it: what runtimes without an owner do.

    Kernels stay loaded where the engine's own owner is a `LikeOwner`; another one's path binds each plan as at start.

    Args:
        own: the engine's own owner, whose layout and kernels the fresh ones have; it stays open.
        path: has bound it.
        device: where the buffers go.
        meter: counts their allocations.

    Attributes:
        freed: buffers that were freed so far.
    """

    def __init__(self, own: PlanOwner, path: DecodePath, device: torch.device, meter: AllocationMeter) -> None:
        over = own.like if isinstance(own, LikeOwner) else partial(path.bind, own.capacity)
        self._make: Callable[[], PlanOwner] = lambda: over(own.buffers.layout.allocate(device, meter))
        super().__init__(self._make())
        self.freed = 0

    def close(self) -> None:
        """Free the plan of the last step."""
        self.owner.close()

    def _replan(self, batch: StepBatch) -> Replan:
        self.freed += len(self.owner.buffers.layout.specs)
        self.owner.close()
        self.owner = self._make()
        return self.owner.update(batch)


class Arm:
    """One arm, to be put into an engine for a while.

    Attributes:
        plans: what stands in for the engine's owners.
    """

    def __init__(self, name: ArmName, engine: Engine, meter: AllocationMeter) -> None:
        self.name = name
        self._engine = engine
        self._own = dict(engine.owners)
        selections, device = engine.blueprint.selections, engine.inputs["token_ids"].device
        self.plans: dict[Any, OwnedPlan] = {
            attention: OwnedPlan(owner)
            if name == "owned"
            else FreshPlan(owner, selections[attention].path, device, meter)
            for attention, owner in engine.owners.items()
        }

    def __enter__(self) -> Arm:
        self._engine.owners.update(self.plans)
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.owners.update(self._own)

    @contextmanager
    def counting(self, allocated: Callable[[], int]) -> Iterator[list[int]]:
        """Count what planning allocates in the steps that are taken meanwhile.

        Args:
            allocated: reads how many allocations there have been.

        Yields:
            A list that holds, afterwards, the allocations of each step, all plans of a step together.
        """
        by_step: list[int] = []
        for plan in self.plans.values():
            plan.allocated = allocated
        try:
            yield by_step
        finally:
            per_plan = [plan.allocations for plan in self.plans.values()]
            for plan in self.plans.values():
                plan.allocated, plan.allocations = None, []
        by_step += [sum(counts) for counts in zip(*per_plan, strict=True)]

    def take_update_ms(self, steps: int) -> list[float]:
        """CPU time of planning in each of the last `steps` steps, all plans of a step together."""
        per_plan = [plan.update_ms[-steps:] for plan in self.plans.values()]
        for plan in self.plans.values():
            plan.update_ms.clear()
        return [sum(times) for times in zip(*per_plan, strict=True)]

    def close(self) -> None:
        """Free what the arm allocated."""
        for plan in self.plans.values():
            plan.close()
