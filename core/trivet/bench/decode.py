"""``trivet bench decode``: how long a decode step takes, and what an owned plan is worth against a fresh one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import asdict, frozen

from trivet.bench.arms import Arm, ArmName, FreshPlan
from trivet.bench.counters import Counter, StepCounts
from trivet.bench.figures import Figures, rounded, table
from trivet.bench.loading import with_limits
from trivet.bench.prompts import drawn_prompts
from trivet.bench.stepping import Segment, decoding, room_tokens, timed_decode

if TYPE_CHECKING:
    from trivet.runtime.runtime import Runtime

COUNTED_STEPS = 20
"""Steps over which allocations and launches are counted, apart from those that are timed."""

FIGURES = ("mean", "p50", "p95", "p99", "plan_cpu_mean", "tokens_per_second")
"""Medians that the table of medians shows."""
COUNTS = ("plan_allocations", "allocations", "frees", "kernels", "launches", "graph_launches")
"""Counts per step that it shows behind them; see `StepCounts` and `ArmCounts`."""

Report = Callable[[str], None]


@frozen
class DecodeSettings:
    """What is measured.

    Attributes:
        model: a checkpoint, or the name of a shipped model.
        batches: numbers of requests that decode together.
        context: tokens of each prompt.
        iterations: decode steps in a segment.
        pairs: segments of each arm; arms take turns.
        arms: what is compared; one of them is timed alone.
        seed: of the prompts.
        load: further arguments of `Runtime.load`; limits as a mapping of those that were asked for.
    """

    model: str
    batches: tuple[int, ...]
    context: int
    iterations: int
    pairs: int
    arms: tuple[ArmName, ...]
    seed: int
    load: Mapping[str, Any]


@frozen
class ArmCounts:
    """What the steps of an arm allocate, free and launch.

    Attributes:
        whole: of whole steps.
        plan_allocations: allocations while the plans of each counted step were prepared, counted as those of `whole`:
            0 where plans are refilled, and where they are allocated the arrays that lie on the device.
    """

    whole: StepCounts
    plan_allocations: tuple[int, ...]

    def per_step(self) -> dict[str, float | None]:
        """Means over the counted steps."""
        return {**asdict(self.whole), "plan_allocations": statistics.fmean(self.plan_allocations)}


def bench_decode(settings: DecodeSettings, report: Report) -> dict[str, Any]:
    """Measure every batch; tells `report` each table as it is known, and returns what a record keeps.

    Within a pair the arms run one after the other over the same prompts and contexts, and which of them comes first
    alternates from pair to pair, so that whatever drifts in the machine falls on both.
    """
    from trivet.runtime.runtime import Runtime

    context = room_tokens(settings.context, max(settings.iterations, COUNTED_STEPS * 2))
    load = with_limits(settings.load, max(settings.batches), context)
    if "fresh" in settings.arms:
        load["cuda_graphs"] = False  # a captured step replays the plan that it was captured with
    results: dict[str, Any] = {"batches": []}
    with Runtime.load(settings.model, autostart=False, **load) as runtime:
        for batch in settings.batches:
            results["batches"].append(_measure(runtime, settings, batch, report))
    return results


def _measure(runtime: Runtime, settings: DecodeSettings, batch: int, report: Report) -> dict[str, Any]:
    engine = runtime._engine
    vocab_size = engine.blueprint.geometry.vocab_size
    prompts = drawn_prompts(np.random.default_rng(settings.seed), [settings.context] * batch, vocab_size)
    segments: dict[str, list[Segment]] = {name: [] for name in settings.arms}
    planning: dict[str, list[list[float]]] = {name: [] for name in settings.arms}
    counts: dict[str, ArmCounts] = {}
    with ExitStack() as stack:
        arms = {name: Arm(name, engine, runtime._meter) for name in settings.arms}
        for arm in arms.values():
            stack.callback(arm.close)
        for name, arm in arms.items():  # also the warm-up
            with arm:
                counts[name] = _count(runtime, arm, prompts)
        for pair in range(settings.pairs):
            order = settings.arms if pair % 2 == 0 else settings.arms[::-1]
            for name in order:
                with arms[name] as arm:
                    segments[name].append(timed_decode(runtime, prompts, settings.iterations))
                    planning[name].append(arm.take_update_ms(settings.iterations))
    report(_pairs_table(batch, settings, segments, planning))
    report(_medians_table(batch, segments, planning, counts))
    return {
        "batch": batch,
        "arms": {
            name: {
                "counts_per_step": counts[name].per_step(),
                "plan_allocations": list(counts[name].plan_allocations),
                "pairs": [
                    {
                        "wall_ms": rounded(segment.wall_ms),
                        "cpu_ms": rounded(segment.cpu_ms),
                        "plan_cpu_ms": rounded(plan_ms),
                        "device_allocations": segment.device_allocations,
                        "figures": asdict(Figures.of(segment.wall_ms)),
                    }
                    for segment, plan_ms in zip(segments[name], planning[name], strict=True)
                ],
                "medians": _medians(segments[name], planning[name]),
            }
            for name in settings.arms
        },
    }


def _count(runtime: Runtime, arm: Arm, prompts: Sequence[Sequence[int]]) -> ArmCounts:
    """What decode steps of `arm` allocate, free and launch."""

    def freed() -> int:
        return sum(plan.freed for plan in arm.plans.values() if isinstance(plan, FreshPlan))

    counter = Counter(runtime._engine.inputs["token_ids"].device, runtime._meter, freed)
    with decoding(runtime, prompts, 2 * COUNTED_STEPS):
        with arm.counting(counter.allocated) as plan_allocations:
            whole = counter.count(runtime.step, COUNTED_STEPS)
        return ArmCounts(whole, tuple(plan_allocations))


def _medians(segments: Sequence[Segment], planning: Sequence[Sequence[float]]) -> dict[str, float]:
    """Medians over the pairs of each figure."""
    figures = [Figures.of(segment.wall_ms) for segment in segments]
    return {
        **{name: statistics.median(getattr(f, name) for f in figures) for name in ("mean", "p50", "p95", "p99")},
        "least": min(f.least for f in figures),
        "cpu_mean": statistics.median(statistics.fmean(segment.cpu_ms) for segment in segments),
        "plan_cpu_mean": statistics.median(statistics.fmean(plan_ms) for plan_ms in planning),
        "tokens_per_second": statistics.median(s.tokens / sum(s.wall_ms) * 1e3 for s in segments),
    }


def _pairs_table(
    batch: int,
    settings: DecodeSettings,
    segments: Mapping[str, Sequence[Segment]],
    planning: Mapping[str, Sequence[Sequence[float]]],
) -> str:
    rows = []
    for pair in range(settings.pairs):
        for name in settings.arms:
            figures = Figures.of(segments[name][pair].wall_ms)
            plan_ms = statistics.fmean(planning[name][pair])
            rows.append((pair + 1, name, figures.mean, figures.p50, figures.p95, figures.p99, plan_ms))
    title = f"batch {batch}, context {settings.context}, {settings.iterations} steps a segment, milliseconds"
    return f"{title}\n{table(('pair', 'arm', 'mean', 'p50', 'p95', 'p99', 'plan CPU'), rows)}"


def _medians_table(
    batch: int,
    segments: Mapping[str, Sequence[Segment]],
    planning: Mapping[str, Sequence[Sequence[float]]],
    counts: Mapping[str, ArmCounts],
) -> str:
    rows = []
    for name, of_arm in counts.items():
        medians, per_step = _medians(segments[name], planning[name]), of_arm.per_step()
        counted = ["-" if per_step[count] is None else f"{per_step[count]:g}" for count in COUNTS]
        rows.append((name, *(medians[figure] for figure in FIGURES), *counted))
    header = ("arm", "mean", "p50", "p95", "p99", "plan CPU", "tok/s", *(count.replace("_", " ") for count in COUNTS))
    return f"batch {batch}, medians over the pairs; allocations and what follows them per step\n{table(header, rows)}"
