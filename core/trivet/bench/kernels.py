"""Time on the device by kernel, from torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trivet.bench.figures import table

SHOWN = 24
NAME_CHARACTERS = 90


@contextmanager
def kernel_times() -> Iterator[list[dict[str, Any]]]:
    """Fills the list with every kernel that ran meanwhile: name, count and total microseconds; the longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kernels: list[dict[str, Any]] = []
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        yield kernels
        torch.cuda.synchronize()
    for entry in trace.key_averages():
        if entry.self_device_time_total:
            kernels.append({"name": entry.key, "count": entry.count, "total_us": entry.self_device_time_total})
    kernels.sort(key=lambda kernel: -kernel["total_us"])


def kernel_table(kernels: Sequence[dict[str, Any]]) -> str:
    """The longest of them, with their mean and their share."""
    whole = sum(kernel["total_us"] for kernel in kernels) or 1.0
    rows = [
        (
            kernel["name"][:NAME_CHARACTERS],
            kernel["count"],
            kernel["total_us"] / kernel["count"],
            kernel["total_us"] / 1e3,
            f"{kernel['total_us'] / whole:.1%}",
        )
        for kernel in kernels[:SHOWN]
    ]
    return f"{table(('kernel', 'count', 'mean us', 'total ms', 'share'), rows)}\nall kernels: {whole / 1e3:.2f} ms"
