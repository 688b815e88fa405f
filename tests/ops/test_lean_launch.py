"""Kept launches pass on what Triton's own would, and are kept apart wherever Triton compiles anew.

Without a device: Triton's compiler and the driver's launcher are replaced. Each kernel that Triton would compile is a
number, and what arrives at the launcher is recorded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not launched", allow_module_level=True)

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from trivet.installed import TESTED_TRITON
from trivet.launch import LeanKernel, lean
from trivet.ops.fused import activation, gated_norm, heads, matmul, norm, pinned
from trivet.ops.fused.table import MatmulConfig

if not triton.__version__.startswith(TESTED_TRITON):
    pytest.skip(f"launches are kept with triton {TESTED_TRITON}x only", allow_module_level=True)

STREAM = 7
BASE_ARGUMENTS = 13
"""What a launcher takes before the kernel's arguments."""


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a CUDA device."""

    is_cuda = True


@triton.jit(do_not_specialize=["free"], do_not_specialize_on_alignment=["loose", "stretch"])
def _kernel(x, loose, free, count, stretch, scale, flag, width: tl.constexpr, mode: tl.constexpr = "plain"):
    pass


class Launches:
    """Stands for the compiler, whose kernels are numbered by what it is asked for, and for the launcher."""

    def __init__(self) -> None:
        self.device = 0
        self.wanted: list[tuple[Any, ...]] = []
        self.arrived: list[tuple[Any, ...]] = []
        self.scratch_bytes = 0

    def compile(self, source: Any, target: Any, options: dict[str, Any], _env_vars: Any = None) -> Any:
        from triton.backends.nvidia.driver import CudaLauncher

        fields = ("num_ctas", "launch_cooperative_grid", "launch_pdl")
        metadata = SimpleNamespace(
            **{name: options[name] for name in fields},
            global_scratch_size=self.scratch_bytes,
            global_scratch_align=1,
            profile_scratch_size=0,
            profile_scratch_align=1,
        )
        wanted = (self.device, source.signature, source.constants, source.attrs, options)
        if wanted not in self.wanted:
            self.wanted.append(wanted)
        return SimpleNamespace(
            run=CudaLauncher(source, metadata),
            function=self.wanted.index(wanted),
            packed_metadata=(options["num_warps"], options["num_ctas"], options["num_stages"]),
            launch_metadata=lambda *arguments: None,
        )

    def launch(self, *arguments: Any) -> None:
        self.arrived.append(arguments)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    from triton.backends.nvidia import driver as nvidia

    recorder = Launches()
    module = SimpleNamespace(launch=recorder.launch)
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **named: module)
    monkeypatch.setattr(nvidia, "library_dirs", lambda: [])
    monkeypatch.setattr("triton.compiler.compile", recorder.compile)
    active = SimpleNamespace(
        get_current_device=lambda: recorder.device,
        get_current_stream=lambda device: STREAM + device,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(driver, "_active", active)
    # What kernels allocate for themselves.
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **named: empty(*shape, **named).as_subclass(OnDevice))
    yield recorder


def anew(kernel: Any) -> JITFunction:
    """A kernel's copy that nothing was compiled for."""
    plain = getattr(kernel, "plain", kernel)
    return JITFunction(
        plain.fn,
        do_not_specialize=plain.do_not_specialize,
        do_not_specialize_on_alignment=plain.do_not_specialize_on_alignment,
    )


def passed(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What arrived at the launcher, without hooks, with tensors as the addresses that it takes them for."""
    base, own = arguments[: BASE_ARGUMENTS - 3], arguments[BASE_ARGUMENTS:]
    return *base, *(argument.data_ptr() if isinstance(argument, torch.Tensor) else argument for argument in own)


class Compared:
    """Launches in Triton's way and twice in the lean way, and compares what arrives at the launcher."""

    def __init__(self, kernel: Any, launches: Launches) -> None:
        self.plain = anew(kernel)
        self.lean = lean(self.plain)
        self.launches = launches
        self.calls = 0

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            self.calls += 1
            for kernel in (self.plain, self.lean, self.lean):
                kernel[grid](*arguments, **named)
            plain, first, kept = self.launches.arrived[-3:]
            assert passed(first) == passed(kept) == passed(plain)

        return launch


def kept_so(arguments: tuple[Any, ...]) -> bool:
    """Whether what arrived came from a kept launch: it passes no hooks on."""
    return arguments[BASE_ARGUMENTS - 2] is None


def on_device(*shape: int, dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.zeros(size + offset, dtype=dtype)[offset:].view(shape).as_subclass(OnDevice)


INTEGERS = st.sampled_from([-(2**31) - 1, -(2**31), -16, -1, 0, 1, 2, 15, 16, 17, 2**31 - 16, 2**31 - 1, 2**31, 2**40])
WIDE = st.one_of(INTEGERS, st.sampled_from([2**63 - 1, 2**63]))
STORAGE = {dtype: torch.zeros(64, dtype=dtype).as_subclass(OnDevice) for dtype in (torch.bfloat16, torch.float32)}
TENSORS = st.builds(
    lambda dtype, offset: STORAGE[dtype][offset:], st.sampled_from(list(STORAGE)), st.sampled_from([0, 1, 2, 8, 16])
)
CALLS = st.tuples(
    TENSORS,
    st.one_of(TENSORS, st.none()),
    WIDE,
    st.one_of(WIDE, st.none(), st.floats(0, 1)),
    st.one_of(INTEGERS, st.booleans()),
    st.sampled_from([0.5, 1.0, 1]),
    st.one_of(st.booleans(), st.none()),
    st.sampled_from([1, 16, "wide", None, torch.float32]),
)
NAMED = st.fixed_dictionaries(
    {},
    optional={
        "mode": st.sampled_from(["plain", "other"]),
        "num_warps": st.sampled_from([1, 8]),
        "num_stages": st.sampled_from([2, 4]),
        "launch_pdl": st.booleans(),
        "maxnreg": st.sampled_from([64, 128]),
        "num_ctas": st.sampled_from([1, 2]),
    },
)


def test_each_launch_is_of_the_kernel_and_the_arguments_that_triton_would_launch(launches: Launches) -> None:
    compared = Compared(_kernel, launches)

    @settings(max_examples=400, deadline=None)
    @given(CALLS, NAMED, st.sampled_from([(3,), (3, 4), (3, 4, 5)]), st.integers(0, 1))
    def drawn(arguments: tuple[Any, ...], named: dict[str, Any], grid: tuple[int, ...], device: int) -> None:
        launches.device = device
        compared[grid](*arguments, **named)

    drawn()


def test_arguments_may_come_by_name_and_defaults_be_left_out(launches: Launches) -> None:
    x = on_device(64)
    named = {"width": 16, "flag": None, "scale": 0.5, "stretch": 2, "count": 1, "free": 3, "loose": x, "x": x}
    compared = Compared(_kernel, launches)
    compared[(1,)](**named)
    compared[(1,)](x, x, 3, **{name: named[name] for name in ("count", "stretch", "scale", "flag", "width")})
    assert kept_so(launches.arrived[-1])
    assert len({arguments[4] for arguments in launches.arrived}) == 1
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'width'"):
        compared.lean[(1,)](x, x, 3, 1, 2, 0.5, None)


def test_one_launch_serves_whatever_triton_does_not_compile_anew_for(launches: Launches) -> None:
    kernel = lean(anew(_kernel))
    x = on_device(64)
    for loose, free, count, stretch, scale in ((x, 1, 16, 5, 0.5), (x[1:], 16, 32, 6, 0.75), (x[3:], 7, 0, 32, 2.0)):
        kernel[(1,)](x, loose, free, count, stretch, scale, None, 16)
    assert len(launches.wanted) == 1
    assert [kept_so(arguments) for arguments in launches.arrived] == [False, True, True]


def test_launches_of_the_fused_kernels_are_kept(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel's real calls, with rows, strides and alignments that Triton compiles anew for."""
    compared: dict[str, Compared] = {}
    for module in (norm, activation, heads, gated_norm, matmul, pinned):
        for name, value in list(vars(module).items()):
            if isinstance(value, LeanKernel):
                compared[name] = Compared(value, launches)
                monkeypatch.setattr(module, name, compared[name])

    for rows in (1, 2, 3, 15, 16, 17):
        for offset in (0, 1):
            x = on_device(rows, 96, offset=offset)
            norm.rms_norm(x[:, :80], on_device(80), 1e-6, dependent=rows % 2 == 0)
            activation.silu_and_mul(x, dependent=False)
            of_heads = x.view(rows, 6, 16)
            slots = on_device(rows, dtype=torch.int64)
            gated_norm.gated_rms_norm(of_heads, of_heads, on_device(16), 1e-6)
            gated_norm.gated_rms_norm(of_heads, of_heads, on_device(16), 1e-6, slots=slots, live_slots=rows)
            pinned.PinnedMatmul(on_device(48, 96))(x, on_device(48))
            pinned.PinnedMatmul(on_device(48, 96), dependent=True)(x, residual=on_device(rows, 48))
            for config in (MatmulConfig("rows", 2, 32, 4), MatmulConfig("tiles", 16, 32, 4, 3, split=2)):
                if config.kernel == "rows" and rows > 4:
                    continue
                weight, arrivals = on_device(48, 96), on_device(8, dtype=torch.int32)
                matmul.launch_matmul(config, x, weight, None, on_device(rows, 24), arrivals, gated=True)
                matmul.launch_matmul(config, x, weight, on_device(48), on_device(rows, 48), arrivals, dependent=True)
            places = tuple(on_device(rows, dtype=torch.int32, offset=offset) for _ in range(4))
            cache = on_device(4, 16, 1, 16)
            norms = (on_device(16), on_device(16), 1e-6, False)
            for some in (norms, None):
                heads.norm_rotate_append(x, 4, some, on_device(64, 16, dtype=torch.float32), 16, places, cache, cache)
    assert len(compared) == 7
    assert all(each.calls for each in compared.values())
    assert all(kept_so(arguments) for arguments in launches.arrived[2::3])


def nothing(*arguments: object, **named: object) -> None:
    pass


@pytest.mark.parametrize("where", ["launch_enter_hook", "launch_exit_hook", "pre_run_hooks"])
def test_triton_launches_while_somebody_hooks_launches(launches: Launches, where: str) -> None:
    kernel = lean(anew(_kernel))
    hooks = kernel.plain.pre_run_hooks if where == "pre_run_hooks" else getattr(knobs.runtime, where).calls
    found = []
    for hooked in (False, False, True, False):
        if hooked:
            hooks.append(nothing)
        try:
            kernel[(1,)](on_device(64), None, 1, 2, 3, 0.5, None, 16)
        finally:
            if hooked:
                hooks.remove(nothing)
        found.append(kept_so(launches.arrived[-1]))
    assert found == [False, True, False, True]


def test_what_a_launcher_must_look_at_is_left_to_it(launches: Launches) -> None:
    kernel = lean(anew(_kernel))
    on_cpu = torch.zeros(64, dtype=torch.bfloat16)
    for _ in range(2):
        kernel[(1,)](on_cpu, None, 1, 2, 3, 0.5, None, 16)
        assert launches.arrived[-1][BASE_ARGUMENTS] is on_cpu
    pointer = SimpleNamespace(dtype=torch.bfloat16, data_ptr=lambda: 16)
    for _ in range(2):
        kernel[(1,)](pointer, None, 1, 2, 3, 0.5, None, 16)
        assert launches.arrived[-1][BASE_ARGUMENTS] is pointer
        assert not kept_so(launches.arrived[-1])
    kernel[lambda bound: (bound["free"],)](on_device(64), None, 5, 2, 3, 0.5, None, 16)
    assert launches.arrived[-1][:3] == (5, 1, 1)


def test_a_kernel_that_wants_scratch_memory_gets_it_at_each_launch(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches.scratch_bytes = 128
    asked: list[int] = []
    allocator = SimpleNamespace(get=lambda: lambda size, align, stream: asked.append(size))
    monkeypatch.setattr("triton.runtime._allocation._allocator", allocator)
    kernel = lean(anew(_kernel))
    for _ in range(3):
        kernel[(2,)](on_device(64), None, 1, 2, 3, 0.5, None, 16)
    assert asked == [256, 256, 256]


def test_another_version_of_triton_launches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = anew(_kernel)
    assert isinstance(lean(plain), LeanKernel)
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    assert lean(plain) is plain
