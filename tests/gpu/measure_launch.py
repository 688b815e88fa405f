"""Times what launches of fused kernels cost the host, kept and in Triton's own way, and writes all figures as JSON.

``python tests/gpu/measure_launch.py out.json``, from the root of the repository, on a machine with a CUDA device. Calls
are queued in bursts that the device's queue takes without blocking, and only the queueing is timed; each figure is the
median of the bursts, in microseconds a call.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from attrs import frozen

from trivet.launch import OWN, LeanKernel
from trivet.ops.fused import activation, heads, norm

BURST = 100
BURSTS = 21
DTYPE = torch.bfloat16
HIDDEN, INTERMEDIATE = 5120, 17408
QUERY_HEADS, KV_HEADS, HEAD_DIM, ROTARY_DIM, PAGE_SIZE = 24, 4, 256, 64, 16
"""As Qwen3.5-27B has them."""


@frozen
class Case:
    """A wrapper's call, and where its kernel is named."""

    call: Callable[[], object]
    module: ModuleType
    kernel: str


def cases(rows: int, device: str = "cuda") -> dict[str, Case]:
    """The wrappers that are timed, for steps of `rows` tokens."""

    def zeros(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    x, weight, gate_up = zeros(rows, HIDDEN), zeros(HIDDEN), zeros(rows, 2 * INTERMEDIATE)
    projected = zeros(rows, (2 * QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM)
    norms = (zeros(HEAD_DIM), zeros(HEAD_DIM), 1e-6, True)
    table = zeros(rows, ROTARY_DIM, dtype=torch.float32)
    count = torch.arange(rows, dtype=torch.int32, device=device)
    places = (count * 0, count, torch.tensor([0, 1], dtype=torch.int32, device=device), count)
    pages = -(-rows // PAGE_SIZE)
    keys, values = (zeros(pages, PAGE_SIZE, KV_HEADS, HEAD_DIM) for _ in range(2))
    appended = partial(
        heads.norm_rotate_append, projected, QUERY_HEADS, norms, table, ROTARY_DIM, places, keys, values, gated=True
    )
    return {
        "rms_norm": Case(partial(norm.rms_norm, x, weight, 1e-6), norm, "_rms_norm_kernel"),
        "silu_and_mul": Case(partial(activation.silu_and_mul, gate_up), activation, "_silu_and_mul_kernel"),
        "norm_rotate_append": Case(appended, heads, "_norm_rotate_append_kernel"),
    }


def microseconds(call: Callable[[], object], wait: Callable[[], None] = torch.cuda.synchronize) -> float:
    """Median host time of one call; `wait` empties the device's queue between bursts."""
    for _ in range(BURST):
        call()
    bursts = []
    for _ in range(BURSTS):
        wait()
        started = time.perf_counter()
        for _ in range(BURST):
            call()
        bursts.append(time.perf_counter() - started)
    wait()
    return statistics.median(bursts) / BURST * 1e6


class NoKernel:
    """Takes a kernel's calls and launches nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.nothing

    @staticmethod
    def nothing(*arguments: object, **named: object) -> None:
        pass


def with_kernel(case: Case, kernel: Any, wait: Callable[[], None]) -> float:
    """Time a wrapper's call with another kernel in the place of its own."""
    own = getattr(case.module, case.kernel)
    setattr(case.module, case.kernel, kernel)
    try:
        return microseconds(case.call, wait)
    finally:
        setattr(case.module, case.kernel, own)


def split(case: Case, wait: Callable[[], None] = torch.cuda.synchronize) -> dict[str, float]:
    """Where the time of one wrapper's call goes."""
    kernel = getattr(case.module, case.kernel)
    assert isinstance(kernel, LeanKernel), "kernels are interpreted, or Triton is of a version that is not tested"
    figures = {
        "kept launch": microseconds(case.call, wait),
        "Triton's launch": with_kernel(case, kernel.plain, wait),
        "wrapper without launch": with_kernel(case, NoKernel(), wait),
    }
    # One kept launch, whose launcher is for a while one that only takes note of its arguments, or does nothing.
    kept = kernel._launch.__globals__[f"{OWN}kept"]
    ((key, (launcher, *rest)),) = kept.items()
    seen: list[tuple[Any, ...]] = []
    try:
        kept[key] = (lambda *arguments: seen.append(arguments), *rest)
        case.call()
        kept[key] = (lambda *arguments: None, *rest)
        figures["kept launch without launcher"] = microseconds(case.call, wait)
    finally:
        kept[key] = (launcher, *rest)
    figures["launcher alone"] = microseconds(partial(launcher, *seen[0]), wait)
    return figures


def main(out: str) -> None:
    """Write all figures to `out`."""
    small = torch.zeros(1, HIDDEN, dtype=DTYPE, device="cuda")
    figures: dict[str, Any] = {
        "x + x": microseconds(lambda: small + small),
        "torch.empty": microseconds(lambda: torch.empty((1, HIDDEN), dtype=DTYPE, device=small.device)),
        "Tensor.new_empty": microseconds(lambda: small.new_empty((1, HIDDEN))),
    }
    for name, case in cases(rows=16).items():
        figures[name] = split(case)
    document = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host_microseconds_a_call": figures,
    }
    Path(out).write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
