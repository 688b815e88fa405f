"""What ran on a device when, and whose every moment was."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from attrs import frozen


@frozen
class DeviceEvent:
    """A kernel or a copy.

    Attributes:
        name: as the profiler has it.
        start_us, end_us: of its run, on one clock for all; the end is not before the start.
    """

    name: str
    start_us: float
    end_us: float


@frozen
class KernelTime:
    """All runs of one kernel.

    Attributes:
        name: as the profiler has it.
        count: its runs.
        total_us: the time that they are charged for.
    """

    name: str
    count: int
    total_us: float


@frozen
class Breakdown:
    """A span of time by kernel; what kernels are charged for and the idle time add up to the span.

    Attributes:
        kernels: the most expensive first.
        span_us: the span.
        idle_us: of it, while nothing ran.
    """

    kernels: tuple[KernelTime, ...]
    span_us: float
    idle_us: float

    @classmethod
    def of(
        cls, events: Sequence[DeviceEvent], since_us: float | None = None, until_us: float | None = None
    ) -> Breakdown:
        """The events of a span; by default from the first start to the last end of at least one event."""
        since_us = min(event.start_us for event in events) if since_us is None else since_us
        until_us = max(event.end_us for event in events) if until_us is None else until_us
        inside = [event for event in events if event.start_us < until_us and event.end_us > since_us]
        charges, idle_us = charged(inside, since_us, until_us)
        totals: dict[str, tuple[int, float]] = {}
        for event, charge in zip(inside, charges, strict=True):
            count, total_us = totals.get(event.name, (0, 0.0))
            totals[event.name] = (count + 1, total_us + charge)
        kernels = [KernelTime(name, count, total_us) for name, (count, total_us) in totals.items()]
        kernels.sort(key=lambda kernel: -kernel.total_us)
        return cls(tuple(kernels), until_us - since_us, idle_us)


def charged(events: Sequence[DeviceEvent], since_us: float, until_us: float) -> tuple[list[float], float]:
    """What each event is charged for within a span, and the idle time of the span, in microseconds.

    A moment belongs to the event that ends first of those that run; the earlier in `events` if several end together.
    So a kernel that is launched while the one before it drains is charged from the end of that one, not for its wait:
    where events end in the order in which they start, each is charged ``end - max(end before, start)``. Charges and
    idle time add up to the span.
    """
    charges = [0.0] * len(events)
    idle_us = 0.0
    now = since_us
    running: list[tuple[float, int]] = []  # by their ends
    starts = sorted((event.start_us, index) for index, event in enumerate(events))
    for start_us, index in (*starts, (until_us, None)):
        reached = min(start_us, until_us)
        while running and now < reached:
            end_us, first = running[0]
            stop = min(end_us, reached)
            if stop > now:
                charges[first] += stop - now
                now = stop
            if end_us <= now:
                heapq.heappop(running)
        if now < reached:
            idle_us += reached - now
            now = reached
        if index is not None:
            heapq.heappush(running, (events[index].end_us, index))
    return charges, idle_us
