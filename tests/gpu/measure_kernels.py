"""Measure what the committed speed table says: ``python -m tests.gpu.measure_kernels OUT.json``.

Each figure is the time of one attention call in a CUDA graph of several, over caches that together exceed the L2.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import torch
from tests.support.attention import batch_of
from tests.support.cuda import COMPILED, PAGED_PREFILL, bound_owner, capacity_here, device_here, untimed_path

from trivet.attention.flashinfer import probe
from trivet.attention.flashinfer.library import TESTED_VERSION
from trivet.attention.flashinfer.paths import FlashInferPath
from trivet.capacity import Limits

PAGE_SIZE = 16
BYTES_BEYOND_L2 = 200 * 2**20
REPLAYS = 7
KV_HEADS = {64: 8, 128: 8, 256: 4}
DECODES = ((1, 4096), (16, 1024), (64, 1024), (64, 4096))
CHUNKS = [
    *((1, chunk, context) for chunk in (16, 64, 128, 256, 512, 1024) for context in (chunk, chunk + 4096)),
    *((8, chunk, context) for chunk in (16, 64, 128, 256) for context in (chunk, chunk + 2048)),
    (1, 4096, 4096),
]


def microseconds(path: FlashInferPath, group: int, head_dim: int, rows: int, chunk: int, context: int) -> float:
    """Median time of one attention call; decode rows if `chunk` is 0."""
    kv_heads, tokens = KV_HEADS[head_dim], rows * max(chunk, 1)
    capacity = capacity_here(path, group, kv_heads, head_dim, Limits(rows, tokens, context, PAGE_SIZE))
    owner = bound_owner(path, capacity)
    batch = batch_of(capacity, [max(chunk, 1)] * rows, [context] * rows)
    owner.update(attrs.evolve(batch, decode_rows=0 if chunk else rows))
    pages = len(batch.page_indices)
    cache_bytes = 2 * pages * PAGE_SIZE * kv_heads * head_dim * 2
    layers = min(64, max(4, math.ceil(BYTES_BEYOND_L2 / cache_bytes)))
    shape = (layers, pages, PAGE_SIZE, kv_heads, head_dim)
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    query = torch.randn(tokens, capacity.query_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    owner.attend(query, keys[0], values[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            owner.attend(query, keys[layer], values[layer])
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / layers)
    owner.close()
    return statistics.median(times)


def plan_microseconds(path: FlashInferPath, group: int, rows: int, context: int) -> float:
    """Median host time of one update to `rows` decode rows, on an idle device."""
    capacity = capacity_here(path, group, 8, 128, Limits(rows, rows, context, PAGE_SIZE))
    owner = bound_owner(path, capacity)
    batch = attrs.evolve(batch_of(capacity, [1] * rows, [context] * rows), decode_rows=rows)
    times = []
    for _ in range(200):
        torch.cuda.synchronize()
        started = time.perf_counter()
        owner.update(batch)
        times.append((time.perf_counter() - started) * 1e6)
    owner.close()
    return statistics.median(times)


def decode_figures(head_dim: int, groups: Iterable[int]) -> list[dict[str, Any]]:
    """Decode kernel against paged-prefill kernel, for groups that the first is compiled for."""
    figures = []
    for group in groups:
        for rows, context in DECODES:
            times = {
                kernel.name.lower(): microseconds(untimed_path(kernel), group, head_dim, rows, 0, context)
                for kernel in (COMPILED, PAGED_PREFILL)
            }
            figures.append({"head_dim": head_dim, "group": group, "rows": rows, "context": context, "us": times})
    return figures


def chunk_figures(head_dim: int, group: int) -> list[dict[str, Any]]:
    """General prefill kernel against the Hopper one."""
    figures = []
    for rows, chunk, context in CHUNKS:
        times = {
            name: microseconds(untimed_path(PAGED_PREFILL, least), group, head_dim, rows, chunk, context)
            for name, least in (("fa2", None), ("fa3", 1))
        }
        figures.append(
            {"head_dim": head_dim, "group": group, "rows": rows, "chunk": chunk, "context": context, "us": times}
        )
    return figures


def main(out: str) -> None:
    """Write all figures to `out`."""
    compiled = {head_dim: probe.compiled_groups("bfloat16", head_dim) for head_dim in KV_HEADS}
    decode = [figure for head_dim, groups in compiled.items() for figure in decode_figures(head_dim, groups)]
    ratios: dict[str, dict[str, float]] = {}
    for head_dim, groups in compiled.items():
        for group in groups:
            logs = [
                math.log(figure["us"]["compiled"] / figure["us"]["paged_prefill"])
                for figure in decode
                if (figure["head_dim"], figure["group"]) == (head_dim, group)
            ]
            ratios.setdefault(str(head_dim), {})[str(group)] = round(math.exp(statistics.mean(logs)), 3)
    chunks = [figure for head_dim, group in ((128, 5), (256, 6)) for figure in chunk_figures(head_dim, group)]
    device = device_here()
    document = {
        "device": device.name,
        "multiprocessors": device.multiprocessors,
        "flashinfer": TESTED_VERSION,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "dtype": "bfloat16",
        "page_size": PAGE_SIZE,
        "kv_heads": KV_HEADS,
        "compiled_groups": compiled,
        "decode_over_prefill": ratios,
        "decode": decode,
        "chunks": chunks,
        "update_host_us": [
            {"kernel": kernel.name.lower(), "group": group, "rows": rows, "context": 4096, "us": us}
            for kernel, group in ((COMPILED, 4), (PAGED_PREFILL, 5))
            for rows in (1, 16, 64)
            for us in [plan_microseconds(untimed_path(kernel), group, rows, 4096)]
        ],
    }
    Path(out).write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(json.dumps({"decode_over_prefill": ratios, "update_host_us": document["update_host_us"]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
