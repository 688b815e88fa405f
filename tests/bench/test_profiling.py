"""The decode steps that are broken down by kernel are those that are meant."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import make_qwen3

import trivet
from trivet.bench.generate import Caller
from trivet.bench.profiling import HEARD_STEPS, PROFILED_STEPS, DecodeProfile, between_marks, profiled_tokens
from trivet.bench.stepping import BenchmarkError
from trivet.bench.timeline import DeviceEvent
from trivet.runtime.step import StepReport

ROWS = 3


class Watched(DecodeProfile):
    """Without a device: notes when the profiler would be started, marked and stopped, by the steps heard so far."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(graph_steps=0), ROWS)  # type: ignore[arg-type]
        self.steps = 0
        self.done: list[tuple[str, int]] = []

    def hear(self, step: StepReport) -> None:
        self.steps += 1
        self._engine.graph_steps += step.path == "decode"
        super().hear(step)

    def _start(self) -> None:
        self.done.append(("start", self.steps))
        self._running = True

    def _mark(self) -> None:
        self.done.append(("mark", self.steps))

    def _stop(self) -> None:
        self.done.append(("stop", self.steps))
        self._running = False


def told(*steps: tuple[str, int, int]) -> Watched:
    profile = Watched()
    for path, rows, count in steps:
        for _ in range(count):
            profile.hear(StepReport(path=path, rows=rows))
    return profile


def test_marks_stand_around_steps_in_which_all_decode_and_the_profiler_starts_before_them() -> None:
    profile = told(("prefill", 2, 1), ("mixed", ROWS, 2), ("decode", ROWS, HEARD_STEPS + 5), ("decode", 1, 4))
    (start, started), (first, begun), (second, ended), (stop, stopped) = profile.done
    assert (start, first, second, stop) == ("start", "mark", "mark", "stop")
    assert 3 < started < begun and ended - begun == PROFILED_STEPS == profile.graph_steps and stopped == ended


@pytest.mark.parametrize("short_by", [1, 2, PROFILED_STEPS])
def test_too_few_steps_are_no_breakdown_and_leave_no_profiler_running(short_by: int) -> None:
    profile = told(("prefill", ROWS, 1), ("decode", ROWS, HEARD_STEPS - short_by), ("decode", ROWS - 1, 9))
    assert [what for what, _ in profile.done].count("stop") == 1 and profile.done[-1][0] == "stop"
    with pytest.raises(BenchmarkError, match=f"all {ROWS} requests decoding: raise max_step_tokens"):
        profile.breakdown()


@pytest.mark.parametrize("max_step_tokens", [ROWS, 5, 64])
def test_requests_get_tokens_enough_to_decode_together_however_many_steps_their_prompts_take(
    max_step_tokens: int, tmp_path: Path
) -> None:
    make_qwen3(tmp_path)
    prompt_tokens = 9
    new_tokens = profiled_tokens(ROWS, prompt_tokens, max_step_tokens)
    limits = trivet.Limits(ROWS, max_step_tokens, prompt_tokens + new_tokens)
    profile = Watched()
    with trivet.Runtime.load(tmp_path, device="cpu", limits=limits) as runtime:
        Caller(runtime, np.random.default_rng(0)).call(ROWS, prompt_tokens, new_tokens, profile.hear)
    assert [what for what, _ in profile.done] == ["start", "mark", "mark", "stop"]
    assert profile._heard == HEARD_STEPS


def test_a_span_is_between_two_marks_and_has_nothing_of_them() -> None:
    mark = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    runs: list[Any] = [("a", 0, 5), (mark, 5, 6), ("a", 7, 9), ("b", 9, 12), (mark, 14, 15), ("a", 16, 20)]
    found = between_marks([DeviceEvent(*run) for run in runs])
    assert [(kernel.name, kernel.count, kernel.total_us) for kernel in found.kernels] == [("b", 1, 3), ("a", 1, 2)]
    assert (found.span_us, found.idle_us) == (8, 3)
    with pytest.raises(BenchmarkError, match="saw 1 of the 2 marks"):
        between_marks([DeviceEvent(*run) for run in runs[:4]])
