"""Measure which kernel multiplies few rows fastest, and write the committed table.

    python -m tests.gpu.tune_matmul TABLE.json RAW.json [--geometry qwen3-14b] [--dependent] [--dtype bfloat16]
        [--rows 16,32,64] [--filling] [--seconds 100]

`TABLE.json` is ``core/trivet/ops/fused/matmul.json``: the shapes of the geometries that are named are replaced there,
for the numbers of rows that are named, and the others stay. `--filling` tries tiles of the sizes that share a weight
evenly among the device's multiprocessors. The library and what the table holds are always among the
candidates; `RAW.json` gets a run more. Every candidate is held against float64 before it is timed.
A figure is the time of one product in a CUDA graph of several, over weights that together exceed the L2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from attrs import asdict, evolve, frozen
from torch import Tensor
from torch.nn.functional import linear, silu

from trivet.ops.fused.activation import silu_and_mul
from trivet.ops.fused.matmul import LEAST_BLOCK_M, blocks_of, launch_matmul
from trivet.ops.fused.norm import rms_norm
from trivet.ops.fused.table import (
    BATCHES,
    LIBRARY,
    MOST_ROWS_WITHOUT_TENSOR_CORES,
    DeviceTable,
    MatmulConfig,
    MatmulShape,
    tables_from,
)

BYTES_BEYOND_L2 = 200 * 2**20
LEAST_LAUNCHES = 12
REPLAYS = 5
WORTH = 0.985
"""A kernel replaces the library where it takes at most this share of its time."""
GIVE_UP = 1.3
"""A candidate that takes this many times the best time so far in its first replay is not replayed again."""
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHARED_MEMORY_BYTES = 227 * 1024
RESERVED_BYTES = 1024
"""Of shared memory, taken by every program."""
LEAST_FILLING = 0.93
"""Programs, over those that fill the device."""
MOST_PARTIAL = 0.15
"""Bytes of partial sums, written and read, over those of the weight."""
MOST_INGESTED = 2.2
"""Bytes that a program reads, over those of its weight rows."""
LEAST_IN_FLIGHT_BYTES = 80 * 1024
"""Of a multiprocessor."""
MOST_SUMS = 128
"""That a thread holds."""
AHEAD = 256
AHEADS = (0, 128, 512, 1024)
"""Elements asked for ahead: with every filling tile, and those tried for the fastest of them."""
FINALISTS = 2
COMPILERS = min(30, os.cpu_count() or 1)


@frozen
class Product:
    """One weight of a model's step.

    Attributes:
        name: of the projection.
        outputs, inner: of the weight, ``[outputs, inner]``; with `gated`, gate and up rows together.
        residual: the product is added to the residual stream.
        gated: the product ends in ``silu(gate) * up``.
    """

    name: str
    outputs: int
    inner: int
    residual: bool = False
    gated: bool = False


def dense(hidden: int, qkv: int, attended: int, intermediate: int, vocabulary: int) -> list[Product]:
    """The products of a dense decoder's step."""
    return [
        Product("qkv", qkv, hidden),
        Product("o", hidden, attended, residual=True),
        Product("gate_up", 2 * intermediate, hidden, gated=True),
        Product("down", hidden, intermediate, residual=True),
        Product("lm_head", vocabulary, hidden),
    ]


GEOMETRIES: dict[str, list[Product]] = {
    "qwen3-14b": dense(5120, 7168, 5120, 17408, 151936),
    "qwen3-4b": dense(2560, 6144, 4096, 9728, 151936),
    "qwen3-0.6b": dense(1024, 4096, 2048, 3072, 151936),
    "qwen3.5-27b": [*dense(5120, 14336, 6144, 17408, 248320), Product("delta_in", 16480, 5120)],
}


def candidates(rows: int) -> Iterator[MatmulConfig]:
    """What may be fastest for up to `rows` rows on a device of the Hopper generation."""
    if rows <= MOST_ROWS_WITHOUT_TENSOR_CORES:
        for block_n, block_k, warps in ((2, 1024, 4), (1, 512, 2), (2, 512, 2), (2, 512, 4), (4, 512, 4), (1, 1024, 4)):
            yield MatmulConfig("rows", block_n, block_k, warps)
        if rows == 1:
            yield MatmulConfig("rows", 2, 2048, 8)
            yield MatmulConfig("rows", 4, 1024, 4)
            return
    block_m = max(LEAST_BLOCK_M, triton.next_power_of_2(rows))
    for weights_first, block_n, block_k, warps, stages in (
        (False, 16, 256, 4, 4),
        (False, 32, 128, 4, 5),
        (False, 32, 256, 4, 3),
        (False, 64, 128, 4, 4),
        (True, 64, 32, 4, 5),
        (True, 64, 64, 4, 3),
        (True, 64, 64, 4, 4),
        (True, 64, 64, 4, 6),
        (True, 64, 128, 4, 2),
        (True, 64, 128, 4, 3),
        (True, 64, 128, 4, 5),
        (True, 64, 256, 4, 3),
        (True, 128, 32, 4, 6),
        (True, 128, 64, 4, 3),
        (True, 128, 64, 8, 3),
        (True, 128, 64, 4, 4),
        (True, 128, 64, 8, 5),
        (True, 128, 128, 8, 2),
        (True, 128, 128, 8, 3),
        (True, 256, 64, 8, 2),
        (True, 256, 64, 8, 4),
    ):
        if not weights_first and block_m == 64:
            continue  # both orders fill the matrix instruction then
        if stages * (block_m + block_n) * block_k * 2 > SHARED_MEMORY_BYTES:
            continue
        for split in range(1, 13):
            yield MatmulConfig("tiles", block_n, block_k, warps, stages, split, weights_first)


def filling(product: Product, rows: int, multiprocessors: int) -> Iterator[MatmulConfig]:
    """Tiles as large as give each multiprocessor one program or two, and as many stages of loads as it has room for."""
    block_m = max(LEAST_BLOCK_M, triton.next_power_of_2(rows))
    for together, split, grain in itertools.product((1, 2), (1, 2, 3, 4, 6, 8), (8, 16)):
        tile = -(-product.outputs // (multiprocessors * together // split) // grain) * grain
        programs = -(-product.outputs // tile) * split
        partial = 8 * rows * product.outputs * (split if split > 1 else 0)
        if (
            not 32 <= tile <= 512
            or programs < LEAST_FILLING * multiprocessors * together
            or partial > MOST_PARTIAL * 2 * product.outputs * product.inner
            or tile + block_m > MOST_INGESTED * tile
        ):
            continue
        room = SHARED_MEMORY_BYTES // together - RESERVED_BYTES
        for block_k, warps in itertools.product((64, 128), (4, 8)):
            found = MatmulConfig("tiles", tile, block_k, warps, 1, split, block_m < 64 and tile > 32, AHEAD)
            block_n, rest_n = blocks_of(found)
            stages = min(8, room // (2 * (block_n + rest_n + block_m) * block_k))
            in_flight = (stages - 1) * (tile + block_m) * block_k * 2 * together
            if stages < 2 or in_flight < LEAST_IN_FLIGHT_BYTES or product.inner // split < 2 * stages * block_k:
                continue
            if block_n * block_m > MOST_SUMS * 32 * warps or (warps == 8 and block_n < 256):
                continue
            yield evolve(found, stages=stages)


def sensible(product: Product, config: MatmulConfig, multiprocessors: int) -> bool:
    """Whether `config` gives the device enough programs for this product, and none of them too little."""
    if config.kernel == "rows":
        return not product.gated or config.block_n > 1
    programs = -(-product.outputs // config.block_n) * config.split
    if config.split > 1 and programs > 16 * multiprocessors:
        return False
    return programs >= 0.9 * multiprocessors and product.inner // config.split >= 4 * config.block_k


@frozen
class Variant:
    """What Triton compiles a kernel for: a candidate, for some products and numbers of rows."""

    config: MatmulConfig
    rows: int
    even: bool
    residual: bool
    gated: bool


def variant(product: Product, config: MatmulConfig, rows: int) -> Variant:
    """The compiled kernel that `config` takes for this product."""
    even = product.outputs % config.block_n == 0
    return Variant(evolve(config, ahead=0), kernel_rows(config, rows), even, product.residual, product.gated)


def compile_one(wanted: Variant, dtype: torch.dtype, dependent: bool) -> str | None:
    """Compile in a process of its own, into Triton's cache on disk; returns what went wrong."""
    try:
        outputs = 256 if wanted.even else 272
        weight = torch.zeros(outputs, 2048, dtype=dtype, device="cuda")
        x = weight.new_zeros(wanted.rows, 2048)
        out = weight.new_zeros(wanted.rows, outputs // 2 if wanted.gated else outputs)
        arrivals = torch.zeros(outputs, dtype=torch.int32, device="cuda")
        launch_matmul(
            wanted.config,
            x,
            weight,
            None,
            out,
            arrivals,
            accumulate=wanted.residual,
            gated=wanted.gated,
            dependent=dependent,
        )
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def compile_all(wanted: set[Variant], dtype: torch.dtype, dependent: bool) -> set[Variant]:
    """Compile side by side; returns those that cannot be compiled or launched."""
    ordered = sorted(wanted, key=str)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(COMPILERS, context) as pool:
        failures = list(pool.map(partial(compile_one, dtype=dtype, dependent=dependent), ordered, chunksize=2))
    failed = {key: failure for key, failure in zip(ordered, failures, strict=True) if failure is not None}
    for key, failure in failed.items():
        print("left out:", key, failure[:200], flush=True)
    return set(failed)


def kernel_rows(config: MatmulConfig, rows: int) -> int:
    """The number of rows that stands for all that share a compiled kernel with `rows`."""
    power: int = triton.next_power_of_2(rows)
    return power if config.kernel == "rows" else max(LEAST_BLOCK_M, power)


def graph_microseconds(launch: Callable[[int], object], launches: int, best: float = math.inf) -> float:
    """Time of one of `launches` calls in a CUDA graph: the median of some replays."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(launches):
            launch(number)
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
        if times[0] > GIVE_UP * best:
            break
    return statistics.median(times)


class Bench:
    """One product's weights and inputs on the device."""

    def __init__(self, product: Product, dtype: torch.dtype) -> None:
        self.product, self.dtype = product, dtype
        generator = torch.Generator("cuda").manual_seed(0)
        copies = max(1, math.ceil(BYTES_BEYOND_L2 / (product.outputs * product.inner * 2)))
        self.weights = [
            torch.empty(product.outputs, product.inner, dtype=dtype, device="cuda").normal_(
                0, product.inner**-0.5, generator=generator
            )
            for _ in range(copies)
        ]
        self.launches = copies * math.ceil(LEAST_LAUNCHES / copies) if copies > 1 else 6
        most = BATCHES[-1]
        self.width = product.outputs // 2 if product.gated else product.outputs
        self.x = torch.randn(most, product.inner, generator=generator, device="cuda").to(dtype)
        self.before = torch.randn(most, self.width, generator=generator, device="cuda").to(dtype)
        self.arrivals = torch.zeros(-(-product.outputs // 16), dtype=torch.int32, device="cuda")
        self.expected, self.slack = self._expected()

    def _expected(self) -> tuple[Tensor, Tensor]:
        # In blocks of weight rows: a float64 copy of an output projection is gigabytes.
        x, products, slack = self.x.double(), [], []
        for block in self.weights[0].split(32768):
            wide = block.double()
            products.append(x @ wide.T)
            slack.append(x.abs() @ wide.abs().T)
        result, bound = torch.cat(products, 1), 1e-5 * torch.cat(slack, 1)
        half_step = HALF_STEP[self.dtype]
        if self.product.gated:
            gate, up = result.chunk(2, 1)
            result = silu(gate) * up
            return result, 5 * half_step * result.abs() + bound[:, : self.width] + 1e-3
        if self.product.residual:
            result = result + self.before.double()
        return result, half_step * result.abs() + bound

    def ours(self, config: MatmulConfig, rows: int, dependent: bool) -> Callable[[int], Tensor]:
        product = self.product
        x = self.x[:rows]
        stream = self.before[:rows].clone() if product.residual else None

        def launch(number: int) -> Tensor:
            out = x.new_empty(rows, self.width) if stream is None else stream
            weight = self.weights[number % len(self.weights)]
            return launch_matmul(
                config,
                x,
                weight,
                None,
                out,
                self.arrivals,
                accumulate=product.residual,
                gated=product.gated,
                dependent=dependent,
            )

        return launch

    def library(self, rows: int) -> Callable[[int], Tensor]:
        x, stream = self.x[:rows], self.before[:rows].clone()

        def launch(number: int) -> Tensor:
            weight = self.weights[number % len(self.weights)]
            if self.product.residual:
                return stream.addmm_(x, weight.T)
            return silu_and_mul(linear(x, weight)) if self.product.gated else linear(x, weight)

        return launch

    def wrong(self, config: MatmulConfig, rows: int, dependent: bool) -> str | None:
        """What is wrong with the candidate's results; three runs must give the same bits."""
        results = [self.ours(config, rows, dependent)(0) for _ in range(3)]
        if not all(torch.equal(results[0], other) for other in results):
            return "not deterministic"
        if self.arrivals.any():
            return "arrivals are left over"
        error = (results[0].double() - self.expected[:rows]).abs()
        if not bool((error <= self.slack[:rows]).all()):
            return f"off by {float(error.max())}"
        return None


@frozen
class Plan:
    """What a run measures.

    Attributes:
        rows: upper ends of ranges of rows.
        filling: candidates are tiles that share the weight evenly.
        before: the table that the run begins with, whose choice is always a candidate.
        dtype: of inputs and weights.
        dependent: time candidates under programmatic dependent launch.
        multiprocessors: of the device.
        deadline: by `time.perf_counter`; what is not measured by then keeps what the table holds.
    """

    rows: tuple[int, ...]
    filling: bool
    before: DeviceTable
    dtype: torch.dtype
    dependent: bool
    multiprocessors: int
    deadline: float

    def tabled(self, product: Product) -> dict[int, MatmulConfig]:
        """What the table holds, by the upper end of a range of rows."""
        name = str(self.dtype).removeprefix("torch.")
        return dict(self.before.shapes.get(MatmulShape(product.outputs, product.inner, name, product.gated), {}))

    def candidates(self, product: Product, rows: int) -> list[MatmulConfig]:
        """What is timed: what the table holds first, if it is not the library."""
        tabled = self.tabled(product).get(rows)
        if self.filling:
            others = filling(product, rows, self.multiprocessors)
            if tabled is not None and tabled.kernel == "tiles":
                others = itertools.chain([evolve(tabled, ahead=AHEAD)], others)
        else:
            others = (c for c in candidates(rows) if sensible(product, c, self.multiprocessors))
        return list(dict.fromkeys([*([tabled] if tabled else []), *others]))


class Timings:
    """Candidates of one product and number of rows, held against float64 and timed.

    Attributes:
        us: of those that are right.
        entries: raw figures.
    """

    def __init__(self, bench: Bench, rows: int, plan: Plan, failed: set[Variant], library_us: float) -> None:
        self._bench, self._rows, self._plan, self._failed = bench, rows, plan, failed
        self._best = library_us
        self.us: dict[MatmulConfig | None, float] = {}
        self.entries: list[dict[str, Any]] = []

    def add(self, config: MatmulConfig) -> None:
        """Measure `config`, unless it cannot be compiled or has been measured."""
        bench, rows, dependent = self._bench, self._rows, self._plan.dependent
        if config in self.us or variant(bench.product, config, rows) in self._failed:
            return
        wrong = bench.wrong(config, rows, dependent)
        if wrong is not None:
            print("WRONG:", bench.product.name, rows, config, wrong, flush=True)
            self.entries.append({"config": asdict(config), "wrong": wrong})
            return
        us = graph_microseconds(bench.ours(config, rows, dependent), bench.launches, self._best)
        self._best = min(self._best, us)
        self.us[config] = us
        self.entries.append({"config": asdict(config), "us": round(us, 2)})

    def fastest(self, number: int) -> list[MatmulConfig]:
        """The fastest of those that were measured."""
        measured = [config for config in self.us if config is not None]
        return sorted(measured, key=self.us.__getitem__)[:number]


def tune(product: Product, plan: Plan, failed: set[Variant]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Raw figures of one product, and its entry of the table."""
    tabled, dtype = plan.tabled(product), plan.dtype
    figures: list[dict[str, Any]] = []
    batches = {str(rows): config_values(tabled.get(rows)) for rows in BATCHES}
    weight_bytes = product.outputs * product.inner * 2
    in_time = time.perf_counter() < plan.deadline
    bench = Bench(product, dtype) if in_time else None
    for rows in plan.rows:
        if bench is None or time.perf_counter() >= plan.deadline:
            print(f"{product.name:8s} rows {rows:2d}: out of time, as before", flush=True)
            continue
        library = graph_microseconds(bench.library(rows), bench.launches)
        timings = Timings(bench, rows, plan, failed, library)
        for config in plan.candidates(product, rows):
            timings.add(config)
        if plan.filling:
            for config in timings.fastest(FINALISTS):
                for ahead in AHEADS:
                    timings.add(evolve(config, ahead=ahead))
        was = timings.us.get(tabled.get(rows), library)
        best_config = next(iter(timings.fastest(1)), None)
        best = library if best_config is None else timings.us[best_config]
        chosen = best_config if best <= WORTH * library else None
        batches[str(rows)] = config_values(chosen)
        rate = weight_bytes / best / 1e6
        print(
            f"{product.name:8s} rows {rows:2d}: {LIBRARY} {library:7.1f} us, before {was:7.1f} us, "
            f"best {best:7.1f} us ({rate:.2f} TB/s)",
            chosen or LIBRARY,
            flush=True,
        )
        figures.append(
            {"product": asdict(product), "rows": rows, "library_us": round(library, 2), "candidates": timings.entries}
        )
    entry = {
        "outputs": product.outputs,
        "inner": product.inner,
        "dtype": str(dtype).removeprefix("torch."),
        "gated": product.gated,
        "batches": batches,
    }
    return figures, entry


def layer_microseconds(
    products: Sequence[Product], table: DeviceTable, rows: int, dtype: torch.dtype, dependent: bool
) -> float:
    """Time of one layer's norms and products, one kernel after the other in a graph, over several layers' weights."""
    qkv, o, gate_up, down = products[:4]
    layers, hidden = 6, qkv.inner
    weights = [
        [torch.randn(p.outputs, p.inner, device="cuda", dtype=dtype) * p.inner**-0.5 for p in (qkv, o, gate_up, down)]
        for _ in range(layers)
    ]
    scale = torch.ones(hidden, dtype=dtype, device="cuda")
    stream = torch.randn(rows, hidden, device="cuda").to(dtype)
    attended = torch.randn(rows, o.inner, device="cuda").to(dtype)
    arrivals = torch.zeros(max(p.outputs for p in products) // 16, dtype=torch.int32, device="cuda")

    def product(p: Product, x: Tensor, weight: Tensor) -> Tensor:
        shape = MatmulShape(p.outputs, p.inner, str(dtype).removeprefix("torch."), p.gated)
        by_rows = table.by_rows(shape)
        config = by_rows[rows] if rows < len(by_rows) else None
        if config is None:
            if p.residual:
                return stream.addmm_(x, weight.T)
            return silu_and_mul(linear(x, weight)) if p.gated else linear(x, weight)
        out = stream if p.residual else x.new_empty(rows, p.outputs // 2 if p.gated else p.outputs)
        return launch_matmul(
            config, x, weight, None, out, arrivals, accumulate=p.residual, gated=p.gated, dependent=dependent
        )

    def layer(number: int) -> None:
        held = weights[number % layers]
        product(qkv, rms_norm(stream, scale, 1e-6, dependent=dependent), held[0])
        product(o, attended, held[1])
        gated = product(gate_up, rms_norm(stream, scale, 1e-6, dependent=dependent), held[2])
        product(down, gated, held[3])

    return graph_microseconds(layer, 3 * layers)


def listed_rows(text: str) -> tuple[int, ...]:
    """Numbers of rows from a command line, each of them the end of a range that the table has."""
    rows = tuple(int(number) for number in text.split(","))
    if not set(rows) <= set(BATCHES):
        raise argparse.ArgumentTypeError(f"{text}: numbers of rows that are tabled are {BATCHES}")
    return rows


def main() -> None:
    """Measure, and write the table and the raw figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("table", type=Path)
    parser.add_argument("raw", type=Path)
    parser.add_argument("--geometry", action="append", choices=sorted(GEOMETRIES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--dependent", action="store_true", help="time candidates under programmatic dependent launch")
    parser.add_argument("--evidence", default="sdk_docs/evidence/matmul-h200.json")
    parser.add_argument("--rows", type=listed_rows, default=BATCHES, help="numbers of rows to measure")
    parser.add_argument("--filling", action="store_true", help="tiles that share a weight evenly")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which nothing more is measured")
    asked = parser.parse_args()
    geometries, dtype = asked.geometry or ["qwen3-14b"], getattr(torch, asked.dtype)
    properties = torch.cuda.get_device_properties(0)
    names, started = [properties.name.lower()], time.perf_counter()
    tables = tables_from(asked.table.read_text(encoding="utf-8")) if asked.table.exists() else {}
    before = tables.get(names[0], DeviceTable())
    deadline = started + asked.seconds
    plan = Plan(asked.rows, asked.filling, before, dtype, asked.dependent, properties.multi_processor_count, deadline)
    products = list({(p.outputs, p.inner, p.gated): p for g in geometries for p in GEOMETRIES[g]}.values())
    wanted = {variant(p, config, rows) for p in products for rows in plan.rows for config in plan.candidates(p, rows)}
    failed = compile_all(wanted, dtype, asked.dependent)
    print(f"compiled {len(wanted)} kernels in {time.perf_counter() - started:.0f} s", flush=True)
    figures, entries = [], []
    for product in products:
        measured, entry = tune(product, plan, failed)
        figures += measured
        entries.append(entry)
        torch.cuda.empty_cache()
        print(f"{product.name}: {time.perf_counter() - started:.0f} s", flush=True)

    document = json.loads(asked.table.read_text(encoding="utf-8")) if asked.table.exists() else {}
    short = names[0].removeprefix("nvidia ")
    held = document.setdefault(short, {"names": sorted({short, *names}), "dependent_launch": False, "shapes": []})
    replaced = {(e["outputs"], e["inner"], e["dtype"], e["gated"]) for e in entries}
    kept = [e for e in held["shapes"] if (e["outputs"], e["inner"], e["dtype"], e["gated"]) not in replaced]
    held["shapes"] = kept + entries
    held["evidence"] = asked.evidence
    asked.table.write_text(table_text(document), encoding="utf-8")

    table = tables_from(asked.table.read_text(encoding="utf-8"))[names[0]]
    chains = []
    for geometry in geometries:
        for rows in (1, 16, 64):
            us = {
                name: round(layer_microseconds(GEOMETRIES[geometry], used, rows, dtype, dependent), 1)
                for name, used, dependent in (
                    ("library", DeviceTable(), False),
                    ("table before, dependent launch", before, True),
                    ("table", table, False),
                    ("table, dependent launch", table, True),
                )
            }
            chains.append({"geometry": geometry, "rows": rows, "us_per_layer": us})
            print(geometry, "rows", rows, "norms and products of a layer:", us, flush=True)
    run = {
        "device": properties.name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "dtype": asked.dtype,
        "dependent": asked.dependent,
        "layers": chains,
        "figures": figures,
    }
    runs = json.loads(asked.raw.read_text(encoding="utf-8"))["runs"] if asked.raw.exists() else []
    asked.raw.write_text(json.dumps({"runs": [*runs, run]}, separators=(",", ":")), encoding="utf-8")
    print(f"done in {time.perf_counter() - started:.0f} s", flush=True)


def config_values(config: MatmulConfig | None) -> dict[str, Any] | str:
    """What the table says of a choice; None is the library."""
    return LIBRARY if config is None else asdict(config)


def table_text(document: dict[str, Any]) -> str:
    """The table with a line for each shape and batch."""
    text = json.dumps(document, indent=1)
    for entry in (entry for device in document.values() for entry in device["shapes"]):
        for config in entry["batches"].values():
            if config != LIBRARY:
                spread = json.dumps(config, indent=1).replace("\n", "\n" + " " * 5)
                text = text.replace(spread, json.dumps(config))
    return text + "\n"


if __name__ == "__main__":
    main()
