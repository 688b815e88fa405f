"""Which kernels are going to serve is said before any is imported, and the plan goes by it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from types import ModuleType

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.runtimes import make_checkpoint

import trivet
from trivet import installed as installed_module
from trivet.caches.state import StateCut
from trivet.capacity import DeviceProfile
from trivet.capacity.chunks import MOST_CUTS_PER_ROW, most_device_chunks
from trivet.capacity.fused import chunk_kernels_missing, fused_kernels_missing
from trivet.geometry import RecurrentGeometry
from trivet.installed import missing_triton
from trivet.plugin.manager import PluginManager
from trivet.runtime.blueprint import draw_blueprint
from trivet.runtime.options import SizingOptions

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


class Driver:
    """Triton's driver module: what it makes of its cache and the compiler."""

    built = False

    @property
    def active(self) -> object:
        if not self.built:
            raise RuntimeError("Failed to find C compiler.")
        return object()


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A machine with Triton whose PATH is empty, and its driver module, which is not built."""
    installed(monkeypatch, {"triton": "3.6.0"})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    driver, runtime = Driver(), ModuleType("triton.runtime")
    runtime.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    installed_module._refused_by_triton.cache_clear()
    yield driver
    installed_module._refused_by_triton.cache_clear()


def a_program(folder: Path, name: str) -> Path:
    program = folder / name
    program.touch(mode=0o755)
    return program


def test_without_a_c_compiler_triton_is_missing_and_it_is_said_what_to_install(no_compiler: Driver) -> None:
    for missing in (missing_triton(), chunk_kernels_missing(HERE, "bfloat16", [LAYER])):
        assert missing is not None and "install gcc" in missing
        assert "RuntimeError: Failed to find C compiler." in missing


def test_what_triton_built_before_serves_without_a_compiler(no_compiler: Driver) -> None:
    no_compiler.built = True
    assert missing_triton() is None


@pytest.mark.parametrize("name", ["gcc", "clang", "CC"])
def test_any_compiler_that_triton_takes_will_do(
    name: str, no_compiler: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = a_program(tmp_path, "cc-of-ours" if name == "CC" else name)
    if name == "CC":
        monkeypatch.setenv("CC", str(program))
    monkeypatch.setattr("trivet.installed.sysconfig.get_path", lambda *names: str(tmp_path))
    assert "python3-dev" in str(missing_triton())
    (tmp_path / "Python.h").touch()
    assert missing_triton() is None


def test_a_compiler_that_cc_names_and_that_is_not_there_is_named(
    no_compiler: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_program(tmp_path, "gcc")  # Triton does not look for it where CC is set
    monkeypatch.setenv("CC", "icc")
    assert "CC names 'icc'" in str(missing_triton())


def test_without_a_compiler_a_model_is_planned_for_the_reference_backend_and_torch_s_operations(
    no_compiler: Driver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = make_checkpoint("qwen3.5", tmp_path / "model", head_dim=64)
    options, plugins = SizingOptions(dtype="bfloat16"), PluginManager.discover()
    with caplog.at_level(logging.WARNING, logger="trivet.blueprint"):
        here = draw_blueprint(checkpoint, options, HERE, plugins)
    assert [selection.path.backend for selection in here.selections.values()] == ["reference"]
    assert not here.capacity.fused_recurrence and not here.capacity.graph_buckets
    (said,) = [record.getMessage() for record in caplog.records if "torch's operations" in record.getMessage()]
    assert "install gcc" in said
    no_compiler.built = True
    installed_module._refused_by_triton.cache_clear()
    built = draw_blueprint(checkpoint, options, HERE, plugins)
    assert built.capacity.fused_recurrence
    assert here.ledger.line("activations").bytes > built.ledger.line("activations").bytes


def test_a_device_that_is_not_here_has_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {})
    assert fused_kernels_missing(H200, "float16") is None
    assert chunk_kernels_missing(H200, "bfloat16", [LAYER]) is None


def test_on_this_machine_triton_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {})
    assert "Triton is not installed" in str(chunk_kernels_missing(HERE, "bfloat16", [LAYER]))
    installed(monkeypatch, {"triton": "3.6.0"})
    assert chunk_kernels_missing(HERE, "bfloat16", [LAYER]) is None


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
