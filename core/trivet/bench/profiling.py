"""Decode steps and calls under torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from trivet.bench.stepping import WARM_STEPS, BenchmarkError
from trivet.bench.timeline import Breakdown, DeviceEvent
from trivet.checked import ceil_div

if TYPE_CHECKING:
    import torch
    from torch.profiler import profile

    from trivet.runtime.engine import Engine
    from trivet.runtime.step import StepReport

PROFILED_STEPS = 16
"""Decode steps that are broken down."""
LEAD_STEPS = 3
"""Decode steps under the profiler before those: graphs are slow to launch when it sees them for the first time."""
HEARD_STEPS = WARM_STEPS + LEAD_STEPS + PROFILED_STEPS + 1
"""Decode steps that `DecodeProfile` must hear: the step that is in flight at the last mark is one of those profiled."""
MARK = "spin_kernel"
"""In the name of the kernel that `torch.cuda._sleep` launches, and that no model does."""


def profiled_tokens(batch: int, prompt_tokens: int, max_step_tokens: int) -> int:
    """New tokens of each of `batch` requests that decode together for as long as `DecodeProfile` needs.

    The first prompt gives tokens while the others are computed. That takes twice the steps that their tokens fill at
    most, since prompts are cut where snapshots or a grid want it.
    """
    prompt_steps = ceil_div(batch * prompt_tokens, max(1, max_step_tokens - batch + 1))
    return 2 * prompt_steps + HEARD_STEPS


@contextmanager
def device_events(device: torch.device) -> Iterator[list[DeviceEvent]]:
    """Fills the list, at the end, with what ran on a CUDA device meanwhile, whichever thread launched it.

    Raises:
        BenchmarkError: the profiler saw nothing.
    """
    import torch

    events: list[DeviceEvent] = []
    with _profile() as trace:
        yield events
        torch.cuda.synchronize(device)
    events += _events_of(trace)


class DecodeProfile:
    """Breaks down decode steps of a runtime that steps on its own thread and leaves one step in flight.

    Told of each step on that thread, it lets the device run dry once and starts the profiler. Two marks in the
    device's work stand around the steps that count, so that the time between steps is part of them and the start is
    not.

    Args:
        engine: the runtime's, on a CUDA device.
        rows: requests that decode in the steps that count.

    Attributes:
        graph_steps: how many of those steps were replays of CUDA graphs.
    """

    def __init__(self, engine: Engine, rows: int) -> None:
        self.graph_steps = 0
        self._engine = engine
        self._rows = rows
        self._heard = 0
        self._trace: profile | None = None
        self._running = False
        self._error: Exception | None = None

    def hear(self, step: StepReport) -> None:
        """Take note of a step that has ended, while the next one is in flight. What fails is told by `breakdown`."""
        if self._error is not None:
            return
        try:
            self._hear(step)
        except Exception as error:  # an observer that raises is not called again, and nobody would say why
            self._error = error
            if self._running:
                with suppress(Exception):
                    self._stop()

    def _hear(self, step: StepReport) -> None:
        if self._heard >= HEARD_STEPS:
            return
        if step.path != "decode" or step.rows != self._rows:
            self._heard = 0
            if self._running:
                self._stop()
            return
        self._heard += 1
        if self._heard == WARM_STEPS:
            self._start()
        elif self._heard == WARM_STEPS + LEAD_STEPS:
            self._mark()
            self.graph_steps = -self._engine.graph_steps
        elif self._heard == WARM_STEPS + LEAD_STEPS + PROFILED_STEPS:
            self._mark()
            self.graph_steps += self._engine.graph_steps
            self._stop()

    def breakdown(self) -> Breakdown:
        """The steps between the marks.

        Raises:
            BenchmarkError: there were too few, or the profiler did not see them.
        """
        if self._error is not None:
            raise BenchmarkError(f"the profiler failed: {type(self._error).__name__}: {self._error}") from self._error
        if self._heard < HEARD_STEPS or self._trace is None:
            raise BenchmarkError(
                f"no {HEARD_STEPS} consecutive steps had all {self._rows} requests decoding: raise max_step_tokens, so "
                "that their prompts are computed in fewer steps"
            )
        return between_marks(_events_of(self._trace))

    def _start(self) -> None:
        import torch

        with torch.cuda.device(self._engine.inputs.device):
            torch.cuda._sleep(1)  # its first launch loads it
            torch.cuda.synchronize()
            self._trace = _profile()
            self._trace.start()
        self._running = True

    def _mark(self) -> None:
        import torch

        with torch.cuda.device(self._engine.inputs.device):
            torch.cuda._sleep(1)  # in the stream of the steps, behind the one in flight

    def _stop(self) -> None:
        import torch

        self._running = False
        torch.cuda.synchronize(self._engine.inputs.device)
        assert self._trace is not None
        self._trace.stop()


def between_marks(events: Sequence[DeviceEvent]) -> Breakdown:
    """The span from the end of the first mark to the start of the second.

    Raises:
        BenchmarkError: there are not two marks.
    """
    marks = sorted((event for event in events if MARK in event.name), key=lambda mark: mark.start_us)
    if len(marks) != 2:
        raise BenchmarkError(
            f"the profiler saw {len(marks)} of the 2 marks around {PROFILED_STEPS} decode steps: leave --kernels out"
        )
    first, last = marks
    return Breakdown.of([event for event in events if MARK not in event.name], first.end_us, last.start_us)


def _profile() -> profile:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA], acc_events=True)


def _events_of(trace: profile) -> list[DeviceEvent]:
    events = [
        DeviceEvent(event.name, event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    if not events:
        raise BenchmarkError("the profiler saw nothing run on the device: leave --kernels out")
    return events
