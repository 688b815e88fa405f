"""Time the split-KV kernel against the paged-prefill kernel: ``python -m tests.gpu.measure_decode OUT.json``.

Ours runs in several shapes, and every one is held against float64 first. Each figure is the median time of one
attention call over decode rows in a CUDA graph of several, over caches that together exceed the L2. What
`split_shape` and the committed table say is chosen from these figures.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import platform
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen
from tests.support.cuda import PAGED_PREFILL, SPLIT_KV, capacity_here, device_here, untimed_path
from torch import Tensor

from trivet.attention.flashinfer.bounds import Workspace
from trivet.attention.flashinfer.layout import decode_workspace
from trivet.attention.flashinfer.library import TESTED_VERSION
from trivet.attention.flashinfer.protocol import DeviceRows, HostRows, PlanSpaces, RowKernel
from trivet.attention.flashinfer.splits import SplitScratch, SplitShape, split_shape
from trivet.capacity import Limits, PlanCapacity

PAGE_SIZE = 16
MOST_ROWS, MOST_CONTEXT = 64, 32768
BYTES_BEYOND_L2 = 200 * 2**20
REPLAYS = 7
COMPILERS = 8
GEOMETRIES = ((40, 8, 128), (32, 8, 128), (24, 4, 256))
"""Query heads, KV heads, head dim; all have as many elements in a token's keys."""
ROWS = (1, 2, 4, 8, 16, 64)
CONTEXTS = (512, 768, 2048, 4096, 32768)
VERIFIED = (1, 16, 513, 640, 129, 4097)
TOLERANCE = 1.5e-2


def shapes(head_dim: int) -> list[SplitShape]:
    """What serves now, first, and others that may be better."""
    now = split_shape(head_dim)
    if head_dim == 256:
        others = [
            SplitShape(32, 128, 64, warps=4, stages=3, programs_per_multiprocessor=2),
            SplitShape(16, 128, 64, warps=4, stages=4, programs_per_multiprocessor=3),
            SplitShape(32, 128, 64, warps=8, stages=2, programs_per_multiprocessor=2),
            SplitShape(64, 128, 64, warps=8, stages=2, programs_per_multiprocessor=2),
            SplitShape(32, 256, 64, warps=8, stages=3, programs_per_multiprocessor=2),
            SplitShape(32, 512, 32, warps=4, stages=3, programs_per_multiprocessor=2),
            SplitShape(32, 512, 16, warps=8, stages=3, programs_per_multiprocessor=2),
        ]
    else:
        others = [
            SplitShape(64, 128, 32, warps=4, stages=3, programs_per_multiprocessor=3),
            SplitShape(64, 256, 32, warps=4, stages=3, programs_per_multiprocessor=3),
            SplitShape(64, 512, 16, warps=4, stages=3, programs_per_multiprocessor=3),
            SplitShape(64, 1024, 16, warps=4, stages=3, programs_per_multiprocessor=3),
            SplitShape(64, 512, 16, warps=8, stages=3, programs_per_multiprocessor=3),
            SplitShape(32, 512, 16, warps=4, stages=4, programs_per_multiprocessor=4),
        ]
    return [now, *others]


def capacity_of(query_heads: int, kv_heads: int, head_dim: int) -> PlanCapacity:
    """One capacity for all rows and contexts, so that a shape is compiled once."""
    limits = Limits(MOST_ROWS, MOST_ROWS, MOST_CONTEXT, PAGE_SIZE)
    return capacity_here(untimed_path(SPLIT_KV), query_heads // kv_heads, kv_heads, head_dim, limits)


def compile_shape(heads: tuple[int, int, int], shape: SplitShape) -> None:
    """Compile in a process of its own; Triton keeps what it compiled on disk."""
    from trivet.attention.flashinfer.split_kv import SplitKv

    SplitKv(capacity_of(*heads), by_token=False, shape=shape).warm(torch.device("cuda"))


@frozen(eq=False)
class Pool:
    """Keys and values of every measured geometry, in turn."""

    keys: Tensor
    values: Tensor

    @classmethod
    def drawn(cls) -> Pool:
        """As many tokens as the largest measured step has."""
        _, kv_heads, head_dim = GEOMETRIES[0]
        elements = MOST_ROWS * MOST_CONTEXT * kv_heads * head_dim
        return cls(*(torch.randn(elements, dtype=torch.bfloat16, device="cuda") for _ in range(2)))

    def layers(self, capacity: PlanCapacity, pages: int) -> list[tuple[Tensor, Tensor]]:
        """Caches of `pages` pages that together exceed the L2, as far as the pool goes."""
        shape = (pages, capacity.limits.page_size, capacity.kv_heads, capacity.head_dim)
        elements = math.prod(shape)
        count = min(len(self.keys) // elements, math.ceil(BYTES_BEYOND_L2 / (4 * elements)))
        cut = [slice(layer * elements, (layer + 1) * elements) for layer in range(max(1, count))]
        return [(self.keys[part].view(shape), self.values[part].view(shape)) for part in cut]


@frozen(eq=False)
class Step:
    """Decode rows on scattered pages, as kernels read them."""

    host: HostRows
    device: DeviceRows
    query: Tensor
    pages: int

    @classmethod
    def of(cls, capacity: PlanCapacity, lengths: list[int], seed: int = 0) -> Step:
        """Rows of those lengths."""
        counts = [-(-length // PAGE_SIZE) for length in lengths]
        indptr = np.concatenate([[0], np.cumsum(counts)])
        order = np.random.default_rng(seed).permutation(indptr[-1])

        def pinned(values: object) -> Tensor:
            return torch.tensor(np.asarray(values, dtype=np.int32)).pin_memory()

        host = HostRows(pinned(np.arange(len(lengths) + 1)), pinned(indptr), pinned(lengths), len(lengths))
        device = DeviceRows(
            query_indptr=host.query_indptr.cuda(),
            page_indptr=host.page_indptr.cuda(),
            last_page_len=pinned([(length - 1) % PAGE_SIZE + 1 for length in lengths]).cuda(),
            page_indices=pinned(order).cuda(),
            token_rows=host.query_indptr[:-1].cuda(),
            positions=(host.kv_lengths - 1).cuda(),
            first_row=0,
        )
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = (len(lengths), capacity.query_heads, capacity.head_dim)
        query = torch.randn(shape, generator=generator, device="cuda")
        return cls(host, device, (2 * query).to(torch.bfloat16), int(indptr[-1]))

    def expected(self, keys: Tensor, values: Tensor) -> Tensor:
        """Attention in float64."""
        outputs = []
        for row, length in enumerate(self.host.kv_lengths.tolist()):
            listed = self.device.page_indices[self.host.page_indptr[row] : self.host.page_indptr[row + 1]].long()
            group = self.query.shape[1] // keys.shape[2]
            key, value = (
                cache[listed].flatten(0, 1)[:length].double().transpose(0, 1).repeat_interleave(group, 0)
                for cache in (keys, values)
            )
            scores = self.query[row].double()[:, None] @ key.transpose(1, 2) * self.query.shape[-1] ** -0.5
            outputs.append((scores.softmax(-1) @ value)[:, 0])
        return torch.stack(outputs)


def spaces_of(workspace: Workspace) -> PlanSpaces:
    """Workspaces of that size."""
    return PlanSpaces(
        torch.empty(workspace.float_bytes, dtype=torch.uint8, device="cuda"),
        torch.zeros(workspace.int_bytes, dtype=torch.uint8, device="cuda"),
        torch.empty(workspace.int_bytes, dtype=torch.uint8, pin_memory=True),
    )


def attended(kernel: RowKernel, spaces: PlanSpaces, step: Step, keys: Tensor, values: Tensor) -> Tensor:
    """Plan and run once."""
    out = torch.empty_like(step.query)
    kernel.run(kernel.plan(step.host, spaces), step.device, spaces, step.query, keys, values, out)
    return out


def verified(kernel: RowKernel, spaces: PlanSpaces, capacity: PlanCapacity, pool: Pool) -> float:
    """The worst error relative to the largest value of a token and head.

    Raises:
        SystemExit: it is larger than rounding explains.
    """
    step = Step.of(capacity, list(VERIFIED), seed=1)
    ((keys, values), *_) = pool.layers(capacity, step.pages)
    expected = step.expected(keys, values)
    out = attended(kernel, spaces, step, keys, values).double()
    worst = float(((out - expected).abs().amax(-1) / expected.abs().amax(-1)).max())
    if not worst <= TOLERANCE:
        raise SystemExit(f"{capacity.attention.label}: worst relative error {worst}, expected at most {TOLERANCE}")
    return worst


def microseconds(kernel: RowKernel, spaces: PlanSpaces, step: Step, layers: list[tuple[Tensor, Tensor]]) -> float:
    """Median time of one call."""
    out = torch.empty_like(step.query)
    plan = kernel.plan(step.host, spaces)
    kernel.run(plan, step.device, spaces, step.query, *layers[0], out)
    torch.cuda.synchronize()
    calls = max(len(layers), 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            kernel.run(plan, step.device, spaces, step.query, *layers[call % len(layers)], out)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def kernels_of(capacity: PlanCapacity) -> dict[str, tuple[RowKernel, PlanSpaces]]:
    """The paged-prefill kernel, and ours in every shape, by what is printed of them."""
    from trivet.attention.flashinfer import kernels
    from trivet.attention.flashinfer.split_kv import SplitKv

    path = untimed_path(PAGED_PREFILL)
    choice = path.choice(capacity)
    made: dict[str, tuple[RowKernel, PlanSpaces]] = {
        "paged_prefill": (
            kernels.load_kernels(capacity, choice).decode,
            spaces_of(decode_workspace(capacity, choice)),
        )
    }
    for shape in shapes(capacity.head_dim):
        scratch = SplitScratch.of(capacity, MOST_ROWS, shape)
        workspace = Workspace(float_bytes=scratch.float_bytes, int_bytes=scratch.int_bytes)
        made[label(shape)] = (SplitKv(capacity, by_token=False, shape=shape), spaces_of(workspace))
    return made


def label(shape: SplitShape) -> str:
    """Tile, least tokens and most splits; warps, stages, programs per multiprocessor."""
    return (
        f"{shape.tile_tokens}/{shape.least_tokens}/{shape.most_splits} w{shape.warps} s{shape.stages} "
        f"p{shape.programs_per_multiprocessor}{' dependent' if shape.dependent else ''}"
    )


def geometric_mean(values: list[float]) -> float:
    """Of positive numbers."""
    return math.exp(statistics.mean(map(math.log, values)))


def main(out: str) -> None:
    """Write all figures to `out`."""
    seconds = {}
    started = time.perf_counter()
    work = [(heads, shape) for heads in GEOMETRIES for shape in shapes(heads[2])]
    with ProcessPoolExecutor(COMPILERS, mp_context=multiprocessing.get_context("spawn")) as compilers:
        list(compilers.map(compile_shape, *zip(*work, strict=True)))
    seconds["compile"] = time.perf_counter() - started
    pool, figures, errors, summary = Pool.drawn(), [], {}, {}
    for heads in GEOMETRIES:
        capacity = capacity_of(*heads)
        made = kernels_of(capacity)
        name = f"{heads[0]}/{heads[1]} hd{heads[2]}"
        errors[name] = {kernel: verified(*those, capacity, pool) for kernel, those in made.items()}
        ratios: dict[str, list[float]] = {kernel: [] for kernel in made}
        for rows in ROWS:
            for context in CONTEXTS:
                step = Step.of(capacity, [context] * rows)
                layers = pool.layers(capacity, step.pages)
                times = {kernel: microseconds(*those, step, layers) for kernel, those in made.items()}
                cache_bytes = 4 * step.pages * PAGE_SIZE * capacity.kv_heads * capacity.head_dim
                figure: dict[str, Any] = {"heads": heads, "rows": rows, "context": context, "cache_bytes": cache_bytes}
                figures.append(figure | {"us": times})
                for kernel, us in times.items():
                    ratios[kernel].append(us / times["paged_prefill"])
                ours = {kernel: us for kernel, us in times.items() if kernel != "paged_prefill"}
                best = min(ours, key=ours.__getitem__)
                print(
                    f"{name:>12} rows {rows:>2} context {context:>5}: paged prefill {times['paged_prefill']:8.1f} us, "
                    f"now {next(iter(ours.values())):8.1f}, best {ours[best]:8.1f} ({best}), "
                    f"{cache_bytes / ours[best] * 1e-6:.2f} TB/s"
                )
        summary[name] = {
            kernel: {"mean_ratio": round(geometric_mean(those), 3), "worst_ratio": round(max(those), 3)}
            for kernel, those in ratios.items()
        }
        for kernel, those in summary[name].items():
            print(f"{name:>12} {kernel:<32} {those}")
    seconds["total"] = time.perf_counter() - started
    document = {
        "device": device_here().name,
        "multiprocessors": device_here().multiprocessors,
        "flashinfer": TESTED_VERSION,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "dtype": "bfloat16",
        "page_size": PAGE_SIZE,
        "shape_labels": "tile/least tokens/most splits, warps, stages, programs per multiprocessor",
        "shapes_that_serve": {str(head_dim): label(split_shape(head_dim)) for head_dim in (64, 128, 256)},
        "worst_relative_errors": errors,
        "split_kv_over_prefill": summary,
        "figures": figures,
        "seconds": seconds,
    }
    Path(out).write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
