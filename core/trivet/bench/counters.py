"""What a step allocates, frees and launches, counted by the benchmark itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import frozen

from trivet.layout import AllocationMeter

if TYPE_CHECKING:
    import torch

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
GRAPH_LAUNCHES = ("cudaGraphLaunch",)
COPIES = ("Memcpy", "Memset")


@frozen
class StepCounts:
    """Per step, as a mean over `steps` of them.

    Attributes:
        allocations, frees: on CUDA of torch's allocator; on a CPU of layouts, torch's temporaries excluded.
        kernels: kernels that ran on the device; None on a CPU.
        launches: launches of single kernels by the host; None on a CPU.
        graph_launches: launches of CUDA graphs; None on a CPU.
    """

    steps: int
    allocations: float
    frees: float
    kernels: float | None = None
    launches: float | None = None
    graph_launches: float | None = None


class Counter:
    """Counts over steps of one runtime.

    Args:
        device: where the runtime lives.
        meter: of the runtime's layouts.
        freed: how many buffers of layouts have been freed so far.
    """

    def __init__(self, device: torch.device, meter: AllocationMeter, freed: Callable[[], int]) -> None:
        self._device = device
        self._meter = meter
        self._freed = freed

    def allocated(self) -> int:
        """How many allocations there have been: on CUDA of torch's allocator, on a CPU of layouts."""
        if self._device.type != "cuda":
            return self._meter.allocations
        import torch

        return int(torch.cuda.memory_stats(self._device)["allocation.all.allocated"])

    def count(self, step: Callable[[], object], steps: int) -> StepCounts:
        """Take `steps` steps and count what they do. Not for steps that are timed: a profiler watches on CUDA."""
        if self._device.type == "cuda":
            return self._count_cuda(step, steps)
        allocations, freed = self._meter.allocations, self._freed()
        for _ in range(steps):
            step()
        return StepCounts(steps, (self._meter.allocations - allocations) / steps, (self._freed() - freed) / steps)

    def _count_cuda(self, step: Callable[[], object], steps: int) -> StepCounts:
        import torch
        from torch.profiler import ProfilerActivity, profile

        before = torch.cuda.memory_stats(self._device)
        for _ in range(steps):
            step()
        after = torch.cuda.memory_stats(self._device)
        allocated, freed = (
            (after[name] - before[name]) / steps for name in ("allocation.all.allocated", "allocation.all.freed")
        )
        torch.cuda.synchronize(self._device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as trace:
            for _ in range(steps):
                step()
            torch.cuda.synchronize(self._device)
        events = list(trace.events() or ())
        kernels = sum(event.device_type.name == "CUDA" and not event.name.startswith(COPIES) for event in events)
        return StepCounts(
            steps,
            allocated,
            freed,
            kernels=kernels / steps,
            launches=sum(event.name in LAUNCHES for event in events) / steps,
            graph_launches=sum(event.name in GRAPH_LAUNCHES for event in events) / steps,
        )
