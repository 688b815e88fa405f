"""Every moment of a span of device time is charged to one event, or is idle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.bench.timeline import Breakdown, DeviceEvent, charged


def events(*spans: tuple[float, float]) -> list[DeviceEvent]:
    return [DeviceEvent(f"k{index}", start_us, end_us) for index, (start_us, end_us) in enumerate(spans)]


@pytest.mark.parametrize(
    ("spans", "charges", "idle_us"),
    [
        ([(0, 4), (4, 9)], [4, 5], 0),
        ([(0, 4), (6, 9)], [4, 3], 2),
        ([(0, 10), (8, 15), (9, 15.5)], [10, 5, 0.5], 0),  # each is launched while the one before it drains
        ([(0, 10), (2, 3), (5, 6)], [8, 1, 1], 0),  # short ones within a long one
        ([(0, 5), (0, 5), (7, 7)], [5, 0, 0], 2),  # together, and none at all
        ([(6, 9), (0, 4)], [3, 4], 2),  # whatever their order
    ],
)
def test_a_moment_belongs_to_the_event_that_ends_first(
    spans: list[tuple[float, float]], charges: list[float], idle_us: float
) -> None:
    found = charged(events(*spans), min(start for start, _ in spans), max(end for _, end in spans))
    assert found == (charges, idle_us)


moments = st.integers(0, 40)
spans = st.tuples(moments, st.integers(0, 12)).map(lambda drawn: (drawn[0], drawn[0] + drawn[1]))


@given(st.lists(spans, max_size=12), moments, st.integers(0, 40))
def test_charges_and_idle_time_are_those_of_each_moment_and_add_up_to_the_span(
    drawn: list[tuple[int, int]], since: int, length: int
) -> None:
    expected, idle = [0] * len(drawn), 0
    for moment in range(since, since + length):
        running = [(end, index) for index, (start, end) in enumerate(drawn) if start <= moment < end]
        if running:
            expected[min(running)[1]] += 1
        else:
            idle += 1
    charges, idle_us = charged(events(*drawn), since, since + length)
    assert (charges, idle_us) == (expected, idle)
    assert sum(charges) + idle_us == length


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), min_size=1, max_size=30))
def test_events_that_end_in_the_order_of_their_starts_are_charged_from_the_end_before(
    drawn: list[tuple[float, float]],
) -> None:
    starts = sorted(start for start, _ in drawn)
    ends = sorted(start + length for start, length in drawn)
    charges, idle_us = charged(events(*zip(starts, ends, strict=True)), starts[0], ends[-1])
    before, expected = starts[0], []
    for start, end in zip(starts, ends, strict=True):
        expected.append(end - max(before, start))
        before = end
    assert charges == pytest.approx(expected, abs=1e-9)
    assert sum(charges) + idle_us == pytest.approx(ends[-1] - starts[0], abs=1e-9)


def test_a_breakdown_sums_the_runs_of_each_kernel_and_holds_what_lies_in_its_span_alone() -> None:
    ran = [DeviceEvent(*run) for run in (("a", 0, 4), ("b", 3, 9), ("a", 10, 12), ("c", 12, 20), ("d", 21, 22))]
    whole, part = Breakdown.of(ran), Breakdown.of(ran, 5, 13)
    assert [(kernel.name, kernel.count, kernel.total_us) for kernel in whole.kernels] == [
        ("c", 1, 8),
        ("a", 2, 6),
        ("b", 1, 5),
        ("d", 1, 1),
    ]
    assert (whole.span_us, whole.idle_us) == (22, 2)
    assert [(kernel.name, kernel.total_us) for kernel in part.kernels] == [("b", 4), ("a", 2), ("c", 1)]
    assert (part.span_us, part.idle_us) == (8, 1)
