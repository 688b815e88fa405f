"""``trivet bench host``: the runtime's own time per step, with a model that computes nothing.

Everything else of a step is there: admission, scheduling, the plan, the inputs, the sampler, tokens handed over,
pages published and released. Requests that end are replaced, so that all of it occurs at its natural rate.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from trivet.bench.figures import Figures, rounded, table
from trivet.bench.null_model import VOCAB_SIZE, null_plugins, write_null_config
from trivet.bench.stepping import BenchmarkError
from trivet.caches.digests import extend_digests
from trivet.caches.pages import PagePool
from trivet.caches.prefix import PrefixCache
from trivet.capacity import Limits
from trivet.sampling.params import Sampling

if TYPE_CHECKING:
    from trivet.runtime.runtime import Runtime

PROMPT_TOKENS = 1024
NEW_TOKENS = 512
NEXT_PROMPT_TOKENS = 64
"""Prompt of a request that takes the place of one that has ended."""
PREFILL_TOKENS = 8192
LOOKUP_REPEATS = 200

Report = Callable[[str], None]


@frozen
class HostSettings:
    """What is measured.

    Attributes:
        requests: numbers of running requests.
        cached_pages: sizes of the prefix cache.
        page_size: tokens per page.
        steps: steps that are timed in each combination.
        seed: of the prompts.
    """

    requests: tuple[int, ...]
    cached_pages: tuple[int, ...]
    page_size: int
    steps: int
    seed: int


def bench_host(settings: HostSettings, report: Report) -> dict[str, Any]:
    """Measure every combination; tells `report` the tables, and returns what a record keeps."""
    steps = []
    for requests in settings.requests:
        for cached_pages in settings.cached_pages:
            steps.append(_steps(settings, requests, cached_pages))
    header = ("requests", "cached pages", "step p50", "CPU p50", "CPU p99", "sampler p50", "own p50", "own us/request")
    rows = [
        (
            entry["requests"],
            entry["cached_pages"],
            entry["wall"]["p50"],
            entry["cpu"]["p50"],
            entry["cpu"]["p99"],
            entry["sampler"]["p50"],
            entry["own_ms"],
            entry["own_ms"] / entry["requests"] * 1e3,
        )
        for entry in steps
    ]
    report(f"a step with a model that computes nothing, milliseconds; own: step less sampler\n{table(header, rows)}")
    lookups = [_lookups(settings, cached_pages) for cached_pages in settings.cached_pages]
    columns = ("cached_pages", "matched_pages", "p50_us", "again_p50_us")
    lookup_rows = [[entry[column] for column in columns] for entry in lookups]
    lookup_header = ("cached pages", "matched pages", "lookup us", "looked up before us")
    report(f"looking up a prompt of {PROMPT_TOKENS} tokens in the prefix cache\n{table(lookup_header, lookup_rows)}")
    return {"steps": steps, "lookups": lookups}


def _steps(settings: HostSettings, requests: int, cached_pages: int) -> dict[str, Any]:
    limits = Limits(requests, PREFILL_TOKENS + requests, PROMPT_TOKENS + NEW_TOKENS, settings.page_size)
    with tempfile.TemporaryDirectory() as directory:
        write_null_config(Path(directory))
        with _null_runtime(Path(directory), limits, limits.logical_pages + cached_pages) as runtime:
            load = _Load(runtime, requests, settings.seed)
            load.fill_cache(cached_pages)
            load.start()
            wall_ms, cpu_ms = load.timed(settings.steps)
            sampler_ms = _sampler_ms(runtime, requests, settings.steps)
            found = runtime.stats()
    wall, sampler = Figures.of(wall_ms), Figures.of(sampler_ms)
    return {
        "requests": requests,
        "cached_pages": cached_pages,
        "pages_in_cache": found["pages_cached"],
        "wall_ms": rounded(wall_ms),
        "cpu_ms": rounded(cpu_ms),
        "sampler_ms": rounded(sampler_ms),
        "wall": asdict(wall),
        "cpu": asdict(Figures.of(cpu_ms)),
        "sampler": asdict(sampler),
        "own_ms": wall.p50 - sampler.p50,
    }


def _null_runtime(directory: Path, limits: Limits, kv_pages: int) -> Runtime:
    import torch

    from trivet.capacity import DeviceProfile
    from trivet.layout import AllocationMeter
    from trivet.runtime.blueprint import draw_blueprint
    from trivet.runtime.load import load_engine
    from trivet.runtime.options import SizingOptions
    from trivet.runtime.runtime import Runtime

    plugins, meter = null_plugins(), AllocationMeter()
    options = SizingOptions(limits=limits, kv_pages=kv_pages)
    blueprint = draw_blueprint(directory, options, DeviceProfile.named("cpu"), plugins)
    engine = load_engine(blueprint, torch.device("cpu"), meter, random_weights=True, seed=0)
    return Runtime(engine, None, None, plugins, meter, autostart=False)


class _Load:
    """Keeps a number of requests running in a runtime."""

    def __init__(self, runtime: Runtime, requests: int, seed: int) -> None:
        self._runtime = runtime
        self._requests = requests
        self._rng = random.Random(seed)
        self._page_size = runtime._engine.blueprint.capacity.limits.page_size

    def fill_cache(self, pages: int) -> None:
        """Leave at least `pages` pages in the prefix cache."""
        while (cached := self._runtime.stats()["pages_cached"]) < pages:
            prompt_tokens = min(PROMPT_TOKENS, (pages - cached) * self._page_size + 1)
            for _ in range(max(1, min(self._requests, (pages - cached) * self._page_size // PROMPT_TOKENS))):
                self._submit(prompt_tokens, 1)
            self._runtime.run_until_idle()

    def start(self) -> None:
        """Bring all requests to decode, at ends that are spread over the steps to come."""
        for row in range(self._requests):
            self._submit(PROMPT_TOKENS, NEW_TOKENS * (row + 1) // self._requests or 1)
        while self._runtime.step().path != "decode":
            self._replace()

    def timed(self, steps: int) -> tuple[list[float], list[float]]:
        """Wall-clock and CPU time of each of `steps` steps, in milliseconds."""
        wall_ms, cpu_ms = [], []
        for _ in range(steps):
            self._replace()
            cpu, wall = time.thread_time(), time.perf_counter()
            report = self._runtime.step()
            wall_ms.append((time.perf_counter() - wall) * 1e3)
            cpu_ms.append((time.thread_time() - cpu) * 1e3)
            if report.rows != self._requests:
                raise BenchmarkError(f"a step had {report.rows} rows, expected {self._requests}")
        return wall_ms, cpu_ms

    def _replace(self) -> None:
        """Submit a request for each that has ended."""
        stats = self._runtime.stats()
        for _ in range(self._requests - stats["requests_running"] - stats["requests_waiting"]):
            self._submit(NEXT_PROMPT_TOKENS, NEW_TOKENS)

    def _submit(self, prompt_tokens: int, new_tokens: int) -> None:
        prompt = self._rng.choices(range(VOCAB_SIZE), k=prompt_tokens)
        self._runtime.submit(prompt, Sampling(max_new_tokens=new_tokens, ignore_eos=True))


def _sampler_ms(runtime: Runtime, rows: int, repeats: int) -> list[float]:
    """Time of the sampler alone over as many rows, from logits to tokens on the host."""
    import torch

    from trivet.sampling.sampler import sample

    sampling = runtime._engine.sampling
    logits = torch.zeros(1, VOCAB_SIZE).expand(rows, -1)
    slots = torch.arange(rows)
    times_ms = []
    with torch.inference_mode():
        for _ in range(repeats):
            started = time.perf_counter()
            sample(sampling, logits, slots, slots, sampling.groups(slots)).to_host()
            times_ms.append((time.perf_counter() - started) * 1e3)
    return times_ms


def _lookups(settings: HostSettings, cached_pages: int) -> dict[str, Any]:
    """Time of one lookup of a prompt whose every page is cached, in a cache of `cached_pages` pages."""
    rng = random.Random(settings.seed)
    page_size = settings.page_size
    pool = PagePool(cached_pages)
    cache = PrefixCache(pool, page_size)
    chain_pages = PROMPT_TOKENS // page_size
    chains: list[list[bytes]] = []
    while pool.free_count:
        tokens = array("i", rng.choices(range(2**17), k=PROMPT_TOKENS))
        digests: list[bytes] = []
        extend_digests(digests, tokens, page_size, min(chain_pages, pool.free_count))
        node = cache.root
        cache.pin(node)
        for digest, page in zip(digests, pool.take(len(digests)), strict=True):
            node = cache.publish(node, digest, page)
        cache.unpin(node)
        chains.append(digests)
    times_us: list[float] = []
    again_us: list[float] = []
    matched = 0
    for _ in range(LOOKUP_REPEATS):
        digests = rng.choice(chains)
        # The second look finds the chain in the processor's cache, however large the prefix cache is.
        for into in (times_us, again_us):
            started = time.perf_counter()
            match = cache.match(digests)
            into.append((time.perf_counter() - started) * 1e6)
        matched = max(matched, len(match.pages))
    return {
        "cached_pages": cached_pages,
        "matched_pages": matched,
        "p50_us": statistics.median(times_us),
        "again_p50_us": statistics.median(again_us),
        "us": rounded(times_us),
        "again_us": rounded(again_us),
    }
