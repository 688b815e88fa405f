"""Which kernels are going to serve is said before any is imported, and the plan goes by it."""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.runtimes import make_checkpoint

import trivet
from trivet.caches.state import StateCut
from trivet.capacity import DeviceProfile
from trivet.capacity.fused import chunk_kernels_missing, fused_kernels_missing
from trivet.geometry import RecurrentGeometry
from trivet.reservation.recurrent import MOST_CUTS_PER_ROW, most_device_chunks

H200 = DeviceProfile.named("h200")
HERE = attrs.evolve(H200, present=True)
LAYER = RecurrentGeometry(key_heads=16, value_heads=48, key_dim=128, value_dim=128, conv_kernel=4)


def installed(monkeypatch: pytest.MonkeyPatch, modules: dict[str, str | None]) -> None:
    """Let the modules be installed, as distributions of these versions, and no others."""
    monkeypatch.setattr(util, "find_spec", lambda name: object() if name in modules else None)

    def version(distribution: str) -> str:
        found = modules.get(distribution.removesuffix("-core"))
        if found is None:
            raise metadata.PackageNotFoundError(distribution)
        return found

    monkeypatch.setattr(metadata, "version", version)


def test_a_device_that_is_not_here_has_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {})
    assert fused_kernels_missing(H200, "float16") is None
    assert chunk_kernels_missing(H200, "bfloat16", [LAYER]) is None


@pytest.mark.parametrize(
    ("modules", "missing"),
    [
        ({}, "Triton is not installed"),
        ({"triton": "3.6.0"}, "fla-core 0.6.0 is not installed"),
        ({"triton": "3.6.0", "fla": None}, "not the distribution fla-core"),
        ({"triton": "3.6.0", "fla": "0.5.1"}, "fla-core 0.5.1 is installed, and only 0.6.0 is tested"),
        ({"triton": "3.6.0", "fla": "0.6.0"}, None),
    ],
)
def test_on_this_machine_what_is_missing_is_named(
    modules: dict[str, str | None], missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, modules)
    found = chunk_kernels_missing(HERE, "bfloat16", [LAYER])
    assert found is None if missing is None else missing in str(found)


def test_widths_taps_dtypes_and_cpus_that_the_kernels_do_not_take_are_named() -> None:
    for name, most, found in (("key_dim", 128, 160), ("value_dim", 256, 320)):
        missing = str(chunk_kernels_missing(H200, "bfloat16", [LAYER, attrs.evolve(LAYER, **{name: found})]))
        assert f"{name.removesuffix('_dim')} heads of up to {most} elements" in missing and str(found) in missing
    missing = str(chunk_kernels_missing(H200, "bfloat16", [LAYER, attrs.evolve(LAYER, conv_kernel=17)]))
    assert "up to 16 taps" in missing and "17" in missing
    assert "float32" in str(fused_kernels_missing(H200, "float32"))
    assert "cpu" in str(fused_kernels_missing(DeviceProfile.named("cpu"), "bfloat16"))


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype", "prompts"),
    [
        ("qwen3", {}, "bfloat16", True),
        ("qwen3.5", {}, "bfloat16", True),
        ("qwen3.5", {}, "float32", False),
        ("qwen3.5", {"linear_value_head_dim": 320}, "bfloat16", False),
        ("qwen3.5", {"linear_conv_kernel_dim": 17}, "bfloat16", False),
    ],
)
def test_prompts_are_planned_to_be_captured_where_their_layers_can_be(
    kind: str, sizes: dict[str, int], dtype: str, prompts: bool, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(kind, tmp_path, head_dim=64, **sizes)
    lines = [line for line in trivet.plan_memory(checkpoint, device="h200", dtype=dtype).items if "graphs" in line.name]
    assert any("prompts" in line.source for line in lines) == (prompts and bool(lines))


@given(
    grain_tokens=st.sampled_from([1, 5, 16, 48, 64, 96, 256]),
    rows=st.lists(
        st.tuples(st.integers(0, 600), st.integers(1, 700), st.lists(st.integers(0, 40), max_size=MOST_CUTS_PER_ROW)),
        min_size=1,
        max_size=6,
    ),
)
def test_no_rows_have_more_chunks_than_were_planned(grain_tokens: int, rows: list[tuple[int, int, list[int]]]) -> None:
    from trivet.ops.packed import PackedRows

    lengths, cuts = [], []
    for row, (start, length, boundaries) in enumerate(rows):
        lengths.append(length)
        first = start // grain_tokens + 1
        places = {(first + boundary) * grain_tokens - start for boundary in boundaries}
        cuts += [StateCut(row, place, len(cuts)) for place in sorted(places) if place < length]
    _, shape = PackedRows(lengths, cuts=cuts).table_values(0)
    assert shape.chunks <= most_device_chunks(sum(lengths), len(lengths), grain_tokens)
