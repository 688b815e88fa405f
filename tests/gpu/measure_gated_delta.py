"""Times the fused Gated DeltaNet kernels at the geometry of Qwen3.5-27B, and writes all figures as JSON.

``python tests/gpu/measure_gated_delta.py out.json``, from the root of the repository, on a machine with a CUDA device.
Each figure is the time of one call in a CUDA graph of several. Decode calls go over states that together exceed the
L2. Of the chunked rule some ways to scan are timed, what serves first.
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
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, evolve
from tests.support.delta import NORM_EPS, PUBLISHED, DeltaLayer, apart
from torch import Tensor

from trivet.caches.state import StateCut
from trivet.ops import PackedRows

BATCHES = (1, 2, 4, 16, 64)
PROMPTS = ((512, None), (4096, None), (4096, 3840))
"""Tokens, and after how many of them the state is kept."""

SWEPT_PROMPT = 4096
SWEPT_ROWS = ((4096,), (512,) * 16)
"""Lengths of the rows for which the ways to scan chunks are timed."""

BYTES_BEYOND_L2 = 400 * 2**20
MOST_CALLS = 64
REPLAYS = 9
COMPILERS = 12
DTYPE = torch.bfloat16

BLOCKS = ((64, 4), (8, 1), (16, 1), (32, 1), (32, 2), (64, 8), (128, 8), (128, 4))
"""Columns of a head's state that a program has, and its warps. The first is what serves."""

INPUT_WARPS = (2, 4, 8)
"""Of a program of the kernel before the chunked rule."""


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


def decode_blocks() -> dict[str, Any]:
    """By which the state of decode rows may be divided, by what is printed of it."""
    from trivet.ops.fused.delta_decode import StateBlocks

    return {f"{columns} w{warps}": StateBlocks(columns, warps) for columns, warps in BLOCKS}


def swept() -> list[dict[str, Any]]:
    """Ways to take states from chunk to chunk and to read outputs, as changes to `FASTEST`, what serves first."""
    scans = [(64, 4, 3), (64, 8, 2), (32, 4, 3), (32, 4, 2), (128, 8, 2)]
    return [{}, *({"columns": columns, "warps": warps, "stages": stages} for columns, warps, stages in scans)]


def compile_one(change: dict[str, Any]) -> str | None:
    """Build one way to scan; what went wrong, or None."""
    try:
        from trivet.ops.fused.delta_scan import FASTEST

        layer = DeltaLayer.drawn(PUBLISHED, 1, DTYPE, seed=0)
        chunked(layer, layer.projected(70), [70], evolve(FASTEST, **change))()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def compile_decode(name: str) -> None:
    """Build what decode takes with the state divided by some blocks."""
    layer = DeltaLayer.drawn(PUBLISHED, 1, DTYPE, seed=0)
    projected, slots = layer.projected(1), layer.some_slots(1)
    decoded(layer, projected, slots, torch.empty(1, PUBLISHED.value_elements, dtype=DTYPE, device="cuda"), name)
    torch.cuda.synchronize()


def compile_inputs(warps: int) -> None:
    """Build the kernel before the chunked rule."""
    from trivet.ops.fused.delta_inputs import delta_inputs

    layer = DeltaLayer.drawn(PUBLISHED, 1, DTYPE, seed=0)
    parameters = (PUBLISHED, layer.conv_weight, layer.a_log, layer.dt_bias, layer.tails, layer.some_slots(1))
    delta_inputs(layer.projected(70), *parameters, PackedRows([70], "cuda").table(0), warps=warps)
    torch.cuda.synchronize()


def decoded(layer: DeltaLayer, projected: Tensor, slots: Tensor, out: Tensor, name: str) -> Tensor:
    """One call, of launches that start early."""
    from trivet.ops.fused.delta_decode import delta_decode

    parameters = (layer.recurrent, layer.conv_weight, layer.a_log, layer.dt_bias, layer.norm_weight, NORM_EPS)
    states = (layer.states, layer.tails, slots, layer.padding_slot)
    return delta_decode(projected, *parameters, *states, out, dependent=True, blocks=decode_blocks()[name])


def chunked(layer: DeltaLayer, projected: Tensor, lengths: list[int], scan: Any) -> Callable[[], Tensor]:
    """The chunked rule alone, on inputs that are there."""
    from trivet.ops.fused.delta_chunks import chunked_delta_rule
    from trivet.ops.fused.delta_inputs import delta_inputs

    table, slots = PackedRows(lengths, "cuda").table(0), layer.some_slots(len(lengths))
    parameters = (layer.recurrent, layer.conv_weight, layer.a_log, layer.dt_bias)
    made = delta_inputs(projected, *parameters, layer.copied().tails, slots, table)
    return lambda: chunked_delta_rule(made, layer.states, slots, table, scan=scan)


def decode_figures() -> list[dict[str, Any]]:
    """Decode at each batch by the blocks of the state."""
    figures = []
    state_bytes = 4 * math.prod(PUBLISHED.state_shape)
    most = max(max(BATCHES) * 2, BYTES_BEYOND_L2 // state_bytes)
    layer = DeltaLayer.drawn(PUBLISHED, most, DTYPE, seed=1)
    order = layer.some_slots(most)
    for rows in BATCHES:
        parts = [part for part in order.split(rows) if len(part) == rows][:MOST_CALLS]
        projected = layer.projected(rows)
        out = torch.empty(rows, PUBLISHED.value_elements, dtype=DTYPE, device="cuda")
        times = {}
        for name in decode_blocks():
            times[name] = microseconds([partial(decoded, layer, projected, part, out, name) for part in parts])
            tb_per_s = 2e-6 * rows * state_bytes / times[name]
            figures.append({"rows": rows, "blocks": name, "us": times[name], "state_tb_per_s": tb_per_s})
            print(f"decode rows {rows:>2} {name:<6} {times[name]:7.2f} us {tb_per_s:5.2f} TB/s", flush=True)
        best = min(times, key=times.__getitem__)
        print(f"best decode rows {rows}: {best} {times[best]:.2f} us, served {next(iter(times.values())):.2f} us")
    return figures


def prefill_figures() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The whole layer by prompt; the chunked rule by the way to scan."""
    from trivet.ops.fused.delta_inputs import delta_inputs
    from trivet.ops.fused.delta_scan import FASTEST
    from trivet.ops.fused.gated_norm import gated_rms_norm

    figures: list[dict[str, Any]] = []
    layer = DeltaLayer.drawn(PUBLISHED, 4, DTYPE, seed=1)
    parameters = (PUBLISHED, layer.conv_weight, layer.a_log, layer.dt_bias)
    kept = layer.snapshots(1)
    for tokens, cut in PROMPTS:
        projected, slots = layer.projected(tokens), layer.some_slots(1)
        table = PackedRows([tokens], "cuda", cuts=() if cut is None else [StateCut(0, cut, 0)]).table(0)
        mixed = torch.randn(tokens, PUBLISHED.value_heads, PUBLISHED.value_dim, device="cuda").to(DTYPE)
        first = PUBLISHED.conv_channels
        gate = projected[:, first : first + PUBLISHED.value_elements].unflatten(1, mixed.shape[1:])
        whole = [partial(layer.chunks, projected, slots, table, kept)]
        inputs = [partial(delta_inputs, projected, *parameters, layer.tails, slots, table, kept[1])]
        norm = [lambda m=mixed, g=gate: gated_rms_norm(m, g, layer.norm_weight, NORM_EPS)]
        figure = {"tokens": tokens, "layer_us": microseconds(whole), "inputs_us": microseconds(inputs)}
        if cut is None:
            figure["rule_us"] = microseconds([chunked(layer, projected, [tokens], FASTEST)])
            figure["norm_us"] = microseconds(norm)
        else:
            figure["cut"] = cut
        started = time.perf_counter()
        for _ in range(20):
            whole[0]()
        figure["host_us"] = (time.perf_counter() - started) * 5e4
        torch.cuda.synchronize()
        figures.append(figure)
        print(" ".join(f"{key} {value:.0f}" for key, value in figure.items()), flush=True)

    projected, slots = layer.projected(SWEPT_PROMPT), layer.some_slots(1)
    table = PackedRows([SWEPT_PROMPT], "cuda").table(0)
    for warps in INPUT_WARPS:
        us = microseconds([partial(delta_inputs, projected, *parameters, layer.tails, slots, table, warps=warps)])
        figures.append({"tokens": SWEPT_PROMPT, "input_warps": warps, "inputs_us": us})
        print(f"prefill inputs w{warps} {us:7.1f} us", flush=True)

    sweep: list[dict[str, Any]] = []
    layer = DeltaLayer.drawn(PUBLISHED, max(map(len, SWEPT_ROWS)), DTYPE, seed=1)
    for lengths in SWEPT_ROWS:
        projected, name = layer.projected(sum(lengths)), f"{len(lengths)} x {lengths[0]}"
        timed = []
        for change in swept():
            try:
                us = microseconds([chunked(layer, projected, list(lengths), evolve(FASTEST, **change))])
            except Exception as error:
                sweep.append({"rows": name, "change": change, "failed": str(error)[:200]})
                continue
            timed.append({"rows": name, "change": change, "rule_us": us})
            print(f"prefill rule {name:<8} {us:7.1f} us with {change or 'what serves'}", flush=True)
        sweep += timed
        if timed:
            print(f"best prefill rule: {min(timed, key=lambda entry: float(str(entry['rule_us'])))}", flush=True)
    return figures, sweep


def verified() -> dict[str, float]:
    """How far all ways are from float64, at rows and a prompt as they are timed.

    Raises:
        SystemExit: further than rounding explains.
    """
    layer = DeltaLayer.drawn(PUBLISHED, 16, DTYPE, seed=2)
    slots, projected = layer.some_slots(16), layer.projected(16)
    expected, states, _ = layer.expected(projected, slots, [1] * 16)
    errors = {}
    for name in decode_blocks():
        copy, out = layer.copied(), torch.empty(16, PUBLISHED.value_elements, dtype=DTYPE, device="cuda")
        errors[name] = apart(decoded(copy, projected, slots, out, name), expected)
        errors[f"state of {name}"] = apart(copy.states[slots], states)
    slots, projected, kept = layer.some_slots(1), layer.projected(512), layer.snapshots(1)
    expected = layer.expected(projected, slots, [512])[0]
    _, states, _ = layer.expected(projected[:300], slots, [300])
    cut = PackedRows([512], "cuda", cuts=[StateCut(0, 300, 0)]).table(0)
    errors["chunks"] = apart(layer.chunks(projected, slots, cut, kept), expected)
    errors["state at a cut"] = apart(kept[0], states)
    errors |= _ways_apart()
    if max(errors.values()) > 2e-2:
        raise SystemExit(f"apart from float64 by {errors}, expected at most 2e-2")
    return errors


def _ways_apart() -> dict[str, float]:
    """How far each way to scan is from what serves, at rows of several chunks."""
    from trivet.ops.fused.delta_scan import FASTEST

    lengths, errors = [200, 64, 65], {}
    layer = DeltaLayer.drawn(PUBLISHED, len(lengths), DTYPE, seed=3)
    projected, draws = layer.projected(sum(lengths)), layer.generator.get_state()
    served = None
    for change in swept():
        copy = layer.copied()
        copy.generator.set_state(draws)  # for the same slots
        try:
            out = chunked(copy, projected, lengths, evolve(FASTEST, **change))()
        except Exception:
            if not change:  # what serves, which others are held against
                raise
            continue  # said where it was built
        served = out.double() if served is None else served
        errors[f"chunks by {change}"] = apart(out, served)
    return errors


def main(out: str) -> None:
    """Write all figures to `out`."""
    started = time.perf_counter()
    with ProcessPoolExecutor(COMPILERS, mp_context=multiprocessing.get_context("spawn")) as compilers:
        built = [compilers.submit(compile_decode, name) for name in decode_blocks()]
        built += [compilers.submit(compile_inputs, warps) for warps in INPUT_WARPS]
        failed = [error for error in compilers.map(compile_one, swept()) if error is not None]
        for each in built:
            each.result()
    seconds = {"compile": time.perf_counter() - started}
    errors = verified()
    decode = decode_figures()
    seconds["decode"] = time.perf_counter() - started
    prefill, sweep = prefill_figures()
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
        "not_built": failed,
        "seconds": seconds,
    }
    Path(out).write_text(json.dumps(document, indent=1), encoding="utf-8")
    print(f"not built: {failed}; worst error {max(errors.values()):.1e}; seconds {json.dumps(seconds)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
