"""Decode steps that are alike: a batch of requests at one context, stepped and timed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attrs import frozen

from trivet.errors import TrivetError
from trivet.sampling.params import Sampling

if TYPE_CHECKING:
    from trivet.runtime.runtime import Runtime

WARM_STEPS = 5
"""Decode steps before the first that is timed."""


class BenchmarkError(TrivetError):
    """A benchmark did not measure what it is to measure, or two sides of it disagree."""


@frozen
class Segment:
    """Consecutive decode steps.

    Attributes:
        wall_ms: wall-clock time of each step.
        cpu_ms: CPU time of the whole process during each step.
        device_allocations: allocations on the device in all of them, as the runtime counts them.
        tokens: new tokens of all of them.
    """

    wall_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]
    device_allocations: int
    tokens: int


def room_tokens(context: int, iterations: int) -> int:
    """Context that a request of `decoding` needs."""
    return context + WARM_STEPS + iterations + 2


@contextmanager
def decoding(runtime: Runtime, prompts: Sequence[Sequence[int]], steps: int) -> Iterator[None]:
    """Prefill `prompts` and let the caller take `steps` steps in which all of them decode; cancelled afterwards.

    Args:
        runtime: one that the caller drives.

    Raises:
        BenchmarkError: they do not fit side by side.
    """
    sampling = Sampling(max_new_tokens=WARM_STEPS + steps + 2, ignore_eos=True)
    requests = [runtime.submit(list(prompt), sampling) for prompt in prompts]
    try:
        report = runtime.step()
        while report.path != "decode" or report.rows < len(requests):
            if report.path == "idle" or any(request.done for request in requests):
                raise BenchmarkError(
                    f"{len(requests)} requests never decoded together: raise max_requests or kv_pages, or lower --batch"
                )
            report = runtime.step()
        for _ in range(WARM_STEPS - 1):
            runtime.step()
        yield
    finally:
        for request in requests:
            request.cancel()
        runtime.run_until_idle()


def timed_decode(runtime: Runtime, prompts: Sequence[Sequence[int]], iterations: int) -> Segment:
    """Time `iterations` steps in which all `prompts` decode.

    Raises:
        BenchmarkError: a step did something else than decode every row.
    """
    with decoding(runtime, prompts, iterations):
        return _timed(runtime, len(prompts), iterations)


def _timed(runtime: Runtime, rows: int, iterations: int) -> Segment:
    wall_ms: list[float] = []
    cpu_ms: list[float] = []
    before = runtime.stats()["device_allocations"]
    for _ in range(iterations):
        cpu, wall = time.process_time(), time.perf_counter()
        report = runtime.step()
        wall_ms.append((time.perf_counter() - wall) * 1e3)
        cpu_ms.append((time.process_time() - cpu) * 1e3)
        if report.path != "decode" or report.rows != rows or report.failed:
            raise BenchmarkError(f"a step to be timed was {report}, expected a decode step of {rows} rows")
    allocations = runtime.stats()["device_allocations"] - before
    return Segment(tuple(wall_ms), tuple(cpu_ms), allocations, rows * iterations)
