"""Times the fused Gated DeltaNet kernels at the geometry of Qwen3.5-27B, and writes all figures as JSON.

``python tests/gpu/measure_gated_delta.py out.json``, from the root of the repository, on a machine with a CUDA device.
Each figure is the time of one call in a CUDA graph of several. Decode calls go over states that together exceed the
L2. Of each library kernel every configuration is timed, the others as they serve.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, evolve
from tests.support.delta import NORM_EPS, PUBLISHED, DeltaLayer, apart
from torch import Tensor

from trivet.ops import PackedRows

BATCHES = (1, 2, 4, 16, 64)
PROMPTS = (512, 2048, 4096, 8192)
SWEPT_PROMPT = 4096
BYTES_BEYOND_L2 = 800 * 2**20
REPLAYS = 15
COMPILERS = 12
DTYPE = torch.bfloat16

DECODE_SHAPES: tuple[tuple[int, int | None], ...] = ((8, 128), (8, None), (4, None), (4, 240), (16, None))
"""Warps of a program, and most registers of a thread. The first is what serves."""


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Median time of one of `calls`, which are captured one after the other."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def swept() -> dict[str, list[dict[str, int]]]:
    """Configurations of each library kernel."""
    return {
        "solve": [{"BK": k, "num_warps": w, "num_stages": 3} for k, w in product((32, 64), (1, 2, 4))],
        "write": [{"num_warps": w, "num_stages": s} for w, s in product((2, 4, 8), (2, 3, 4))],
        "scan": [{"BV": v, "num_warps": w, "num_stages": s} for v, w, s in product((32, 64), (2, 4), (2, 3, 4))],
        "read": [
            {"BK": 128, "BV": 128, "num_warps": 8, "num_stages": 3},
            {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 3},
            {"BK": 64, "BV": 128, "num_warps": 4, "num_stages": 3},
            {"BK": 128, "BV": 64, "num_warps": 4, "num_stages": 2},
            {"BK": 32, "BV": 32, "num_warps": 2, "num_stages": 3},
        ],
    }


def compile_one(kernel: str, config: dict[str, int]) -> str | None:
    """Build one configuration; what went wrong, or None."""
    try:
        from trivet.ops.fused.delta_chunks import CONFIGS

        layer = DeltaLayer.drawn(PUBLISHED, 1, DTYPE, seed=0)
        chunked(layer, layer.projected(70), [70], evolve(CONFIGS, **{kernel: config}))()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def compile_decode(warps: int, registers: int | None, dependent: bool) -> None:
    """Build one shape of the decode kernel."""
    layer = DeltaLayer.drawn(PUBLISHED, 1, DTYPE, seed=0)
    layer.decode(layer.projected(1), layer.some_slots(1), warps=warps, registers=registers, dependent=dependent)
    torch.cuda.synchronize()


def chunked(layer: DeltaLayer, projected: Tensor, lengths: list[int], configs: Any) -> Callable[[], Tensor]:
    """The chunked rule alone, on inputs that are there."""
    from trivet.ops.fused.delta_chunks import chunked_delta_rule
    from trivet.ops.fused.delta_inputs import delta_inputs

    table, slots = PackedRows(lengths, "cuda").table(0), layer.some_slots(len(lengths))
    parameters = (layer.recurrent, layer.conv_weight, layer.a_log, layer.dt_bias)
    made = delta_inputs(projected, *parameters, layer.copied().tails, slots, table)
    state = layer.states[slots]
    return lambda: chunked_delta_rule(made.query, made.key, made.value, made.decay, made.beta, state, table, configs)


def decode_figures() -> list[dict[str, Any]]:
    """Decode at each batch, by shape and by whether launches overlap."""
    figures = []
    for rows in BATCHES:
        state_bytes = 4 * math.prod(PUBLISHED.state_shape)
        groups = max(2, BYTES_BEYOND_L2 // (rows * state_bytes))
        groups = min(groups, 256 // rows) if rows < 64 else groups
        layer = DeltaLayer.drawn(PUBLISHED, rows * groups, DTYPE, seed=rows)
        order, projected = layer.some_slots(rows * groups), layer.projected(rows)
        for (warps, registers), dependent in product(DECODE_SHAPES, (True, False)):
            how = {"warps": warps, "registers": registers, "dependent": dependent}
            us = microseconds([partial(layer.decode, projected, part, **how) for part in order.split(rows)])
            figures.append({"rows": rows, **how, "us": us, "state_tb_per_s": 2e-6 * rows * state_bytes / us})
            print(figures[-1], flush=True)
    return figures


def prefill_figures() -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """The whole layer by prompt; each kernel's configurations; the best of each together."""
    from trivet.ops.fused.delta_chunks import CONFIGS
    from trivet.ops.fused.delta_inputs import delta_inputs
    from trivet.ops.fused.gated_norm import gated_rms_norm

    figures: list[dict[str, Any]] = []
    layer = DeltaLayer.drawn(PUBLISHED, 4, DTYPE, seed=1)
    parameters = (PUBLISHED, layer.conv_weight, layer.a_log, layer.dt_bias)
    for tokens in PROMPTS:
        projected, slots = layer.projected(tokens), layer.some_slots(1)
        table = PackedRows([tokens], "cuda").table(0)
        mixed = torch.randn(tokens, PUBLISHED.value_heads, PUBLISHED.value_dim, device="cuda").to(DTYPE)
        first = PUBLISHED.conv_channels
        gate = projected[:, first : first + PUBLISHED.value_elements].unflatten(1, mixed.shape[1:])
        whole = [lambda p=projected, s=slots, t=table: layer.chunks(p, s, t)]
        inputs = [lambda p=projected, s=slots, t=table: delta_inputs(p, *parameters, layer.tails, s, t)]
        norm = [lambda m=mixed, g=gate: gated_rms_norm(m, g, layer.norm_weight, NORM_EPS)]
        figure = {
            "tokens": tokens,
            "layer_us": microseconds(whole),
            "inputs_us": microseconds(inputs),
            "rule_us": microseconds([chunked(layer, projected, [tokens], CONFIGS)]),
            "norm_us": microseconds(norm),
        }
        started = time.perf_counter()
        for _ in range(20):
            whole[0]()
        figure["host_us"] = (time.perf_counter() - started) * 5e4
        torch.cuda.synchronize()
        figures.append(figure)
        print(figure, flush=True)

    projected = layer.projected(SWEPT_PROMPT)
    sweep: dict[str, list[dict[str, Any]]] = {}
    best = CONFIGS
    for kernel, configs in swept().items():
        sweep[kernel] = []
        for config in configs:
            try:
                us = microseconds([chunked(layer, projected, [SWEPT_PROMPT], evolve(CONFIGS, **{kernel: config}))])
            except Exception as error:
                sweep[kernel].append({"config": config, "failed": str(error)[:200]})
                continue
            sweep[kernel].append({"config": config, "rule_us": us})
        timed = [entry for entry in sweep[kernel] if "rule_us" in entry]
        fastest = min(timed, key=lambda entry: float(entry["rule_us"]))
        best = evolve(best, **{kernel: fastest["config"]})
        print(kernel, fastest, flush=True)
    copy = layer.copied()
    now, then = (chunked(each, projected, [SWEPT_PROMPT], c) for each, c in ((layer, CONFIGS), (copy, best)))
    together = {"configs": asdict(best), "rule_us": microseconds([then]), "served_us": microseconds([now])}
    return figures, sweep, together


def verified() -> dict[str, float]:
    """How far both ways are from float64, at rows and a prompt as they are timed.

    Raises:
        SystemExit: further than rounding explains.
    """
    layer = DeltaLayer.drawn(PUBLISHED, 16, DTYPE, seed=2)
    slots, projected = layer.some_slots(16), layer.projected(16)
    expected = layer.expected(projected, slots, [1] * 16)[0]
    errors = {"decode": apart(layer.decode(projected, slots), expected)}
    slots, projected = layer.some_slots(1), layer.projected(2048)
    expected = layer.expected(projected, slots, [2048])[0]
    errors["chunks"] = apart(layer.chunks(projected, slots, PackedRows([2048], "cuda").table(0)), expected)
    if max(errors.values()) > 2e-2:
        raise SystemExit(f"apart from float64 by {errors}, expected at most 2e-2")
    return errors


def main(out: str) -> None:
    """Write all figures to `out`."""
    started = time.perf_counter()
    with ProcessPoolExecutor(COMPILERS, mp_context=multiprocessing.get_context("spawn")) as compilers:
        shapes = [
            compilers.submit(compile_decode, *shape, dependent)
            for shape in DECODE_SHAPES
            for dependent in (True, False)
        ]
        one = [(kernel, config) for kernel, configs in swept().items() for config in configs]
        failed = [error for error in compilers.map(compile_one, *zip(*one, strict=True)) if error is not None]
        for shape in shapes:
            shape.result()
    seconds = {"compile": time.perf_counter() - started}
    errors = verified()
    decode = decode_figures()
    prefill, sweep, together = prefill_figures()
    seconds["total"] = time.perf_counter() - started
    document = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": "bfloat16",
        "geometry": asdict(PUBLISHED),
        "apart_from_float64": errors,
        "decode": decode,
        "prefill": prefill,
        "configurations": sweep,
        "best_configurations": together,
        "not_built": failed,
        "seconds": seconds,
    }
    Path(out).write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(json.dumps(together), json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
