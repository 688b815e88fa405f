"""What a CUDA device takes beside a runtime's own buffers stands in the ledger, planned without the device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trivet
from trivet.attention import Selection
from trivet.attention.reference.path import ReferencePath
from trivet.geometry import AttentionGeometry
from trivet.plugin import Rope
from trivet.reservation import GRAPHS_DRIVER_LINE, GRAPHS_LINE
from trivet.runtime.blueprint import _graph_buckets

ATTENTION = AttentionGeometry(8, 2, 64, Rope(theta=1e4, rotary_dim=64))


class Captures(ReferencePath):
    """A path whose decode steps may be captured."""

    captures = True


def lines(**settings: object) -> dict[str, int]:
    ledger = trivet.plan_memory("qwen3-14b", device="h200", **settings)
    assert ledger.total_bytes == sum(line.bytes for line in ledger.items)
    return {line.name: line.bytes for line in ledger.items}


def test_context_and_graphs_are_planned_on_a_gpu_and_on_a_cpu_are_not() -> None:
    planned = lines()
    assert {"CUDA context", GRAPHS_LINE, GRAPHS_DRIVER_LINE} <= set(planned)
    on_cpu = trivet.plan_memory("tiny-qwen3", device="cpu")
    assert not [line.name for line in on_cpu.items if "CUDA" in line.name]


def test_without_graphs_their_lines_are_gone_and_the_pages_get_their_bytes() -> None:
    with_graphs, without = lines(), lines(cuda_graphs=False)
    assert {GRAPHS_LINE, GRAPHS_DRIVER_LINE}.isdisjoint(without)
    freed = with_graphs[GRAPHS_LINE] + with_graphs[GRAPHS_DRIVER_LINE]
    page = 2621440
    assert abs(freed - (without["KV pages"] - with_graphs["KV pages"])) < page


def test_graphs_take_more_where_more_rows_may_decode() -> None:
    sizes = [lines(limits=trivet.Limits(rows, 4096, 4096, 16))[GRAPHS_LINE] for rows in (1, 16, 64, 256)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


@given(most=st.integers(1, 5000))
def test_every_number_of_rows_has_a_bucket_of_which_most_is_not_padding(most: int) -> None:
    path = Captures()
    buckets = _graph_buckets(most, {ATTENTION: Selection(path, "for a test", ())})
    assert list(buckets) == sorted(set(buckets)) and buckets[0] == 1 and buckets[-1] == most
    for rows in range(1, most + 1):
        bucket = next(size for size in buckets if size >= rows)
        assert bucket - rows <= max(bucket / 2, 1)


def test_a_path_that_does_not_capture_has_no_buckets() -> None:
    assert _graph_buckets(64, {ATTENTION: Selection(ReferencePath(), "for a test", ())}) == ()


@pytest.mark.parametrize(("model", "parts"), [("qwen3-0.6b", 1), ("qwen3.5-4b", 3)])
@pytest.mark.parametrize("device", ["h200", "a100"])
def test_half_precision_is_planned_for_fused_kernels_and_single_precision_is_not(
    device: str, model: str, parts: int
) -> None:
    half = trivet.plan_memory(model, device=device, dtype="bfloat16").line("activations").bytes
    single = trivet.plan_memory(model, device=device, dtype="float32").line("activations").bytes
    assert parts * half < single
