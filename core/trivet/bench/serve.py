"""``trivet bench serve``: many clients at once, each streaming its answer: throughput, TTFT and ITL.

The clients are coroutines over `Runtime.astream` in this process, so that times are what a reader sees.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import asdict, frozen

from trivet.bench.figures import Figures, rounded, table
from trivet.bench.loading import with_limits
from trivet.bench.prompts import Lengths, drawn_prompts
from trivet.bench.stepping import BenchmarkError
from trivet.sampling.params import Sampling

if TYPE_CHECKING:
    from trivet.runtime.runtime import Runtime

WARM_REQUESTS = 2

Report = Callable[[str], None]


@frozen
class ServeSettings:
    """What is served.

    Attributes:
        model: a checkpoint, or the name of a shipped model.
        requests: how many requests.
        prompt_tokens, new_tokens: theirs.
        concurrency: most requests that are open at once; None opens all of them at once.
        seed: of the prompts and lengths.
        load: further arguments of `Runtime.load`; limits as a mapping of those that were asked for.
    """

    model: str
    requests: int
    prompt_tokens: Lengths
    new_tokens: Lengths
    concurrency: int | None
    seed: int
    load: Mapping[str, Any]


@frozen
class Arrivals:
    """When one client sent its request and received its tokens, in milliseconds since the first was sent."""

    sent_ms: float
    tokens_ms: tuple[float, ...]

    @property
    def ttft_ms(self) -> float:
        """Time to first token."""
        return self.tokens_ms[0] - self.sent_ms

    @property
    def itl_ms(self) -> list[float]:
        """Inter-token latencies."""
        return [later - earlier for earlier, later in zip(self.tokens_ms, self.tokens_ms[1:], strict=False)]


def bench_serve(settings: ServeSettings, report: Report) -> dict[str, Any]:
    """Serve all requests; tells `report` the table, and returns what a record keeps."""
    from trivet.runtime.runtime import Runtime

    open_at_once = min(settings.concurrency or settings.requests, settings.requests)
    load = with_limits(settings.load, open_at_once, settings.prompt_tokens.most + settings.new_tokens.most)
    rng = np.random.default_rng(settings.seed)
    prompt_lengths = settings.prompt_tokens.draw(rng, settings.requests)
    new_tokens = settings.new_tokens.draw(rng, settings.requests)
    with Runtime.load(settings.model, **load) as runtime:
        vocab_size = runtime._engine.blueprint.geometry.vocab_size
        prompts = drawn_prompts(rng, prompt_lengths, vocab_size)
        warm = drawn_prompts(rng, prompt_lengths[:WARM_REQUESTS], vocab_size)
        asyncio.run(_serve(runtime, warm, new_tokens[:WARM_REQUESTS], open_at_once))
        cpu, wall = time.process_time(), time.perf_counter()
        arrivals = asyncio.run(_serve(runtime, prompts, new_tokens, open_at_once))
        wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    tokens = sum(len(client.tokens_ms) for client in arrivals)
    ttft = Figures.of([client.ttft_ms for client in arrivals])
    gaps = [gap for client in arrivals for gap in client.itl_ms]
    itl = Figures.of(gaps) if gaps else None
    header = ("", "mean", "p50", "p95", "p99")
    rows = [("TTFT ms", ttft.mean, ttft.p50, ttft.p95, ttft.p99)]
    if itl is not None:
        rows.append(("ITL ms", itl.mean, itl.p50, itl.p95, itl.p99))
    report(
        f"{settings.requests} requests, {open_at_once} open at once: {tokens} new tokens in {wall_s:.2f} s, "
        f"{tokens / wall_s:.1f} tok/s, {settings.requests / wall_s:.2f} requests/s\n{table(header, rows)}"
    )
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "new_tokens": tokens,
        "prompt_tokens": sum(prompt_lengths),
        "tokens_per_second": tokens / wall_s,
        "ttft_ms": asdict(ttft),
        "itl_ms": asdict(itl) if itl is not None else None,
        "clients": [
            {
                "prompt_tokens": length,
                "sent_ms": round(client.sent_ms, 4),
                "tokens_ms": rounded(client.tokens_ms),
            }
            for length, client in zip(prompt_lengths, arrivals, strict=True)
        ],
    }


async def _serve(
    runtime: Runtime, prompts: Sequence[list[int]], new_tokens: Sequence[int], open_at_once: int
) -> list[Arrivals]:
    """Stream every prompt, at most so many at once; the arrivals in the order of the prompts."""
    started = time.perf_counter()
    places = asyncio.Semaphore(open_at_once)

    def now_ms() -> float:
        return (time.perf_counter() - started) * 1e3

    async def client(prompt: list[int], count: int) -> Arrivals:
        async with places:
            sent_ms = now_ms()
            stream = runtime.astream(prompt, Sampling(max_new_tokens=count, ignore_eos=True))
            tokens_ms = tuple([now_ms() async for _ in stream])
        if len(tokens_ms) != count:
            raise BenchmarkError(f"a request ended after {len(tokens_ms)} of {count} tokens")
        return Arrivals(sent_ms, tokens_ms)

    return await asyncio.gather(*(client(*request) for request in zip(prompts, new_tokens, strict=True)))
