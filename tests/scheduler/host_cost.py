"""The scheduler's own time per step, without a model.

Run as ``python -m tests.scheduler.host_cost`` from the repository's root. Every row decodes, contexts start at 1,024
tokens; a step is `schedule`, the batch with its arrays, and `complete`. A request that ends is replaced by one like
it, so that admission, prefill of 64 tokens, publishing, release and eviction are part of the steps. Times are CPU time
of the thread, so that other work on the machine does not show.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from trivet.caches.pages import PagePool
from trivet.caches.prefix import PrefixCache
from trivet.caches.slots import SlotPool
from trivet.capacity import Limits
from trivet.scheduler import Request, Scheduler

PROMPT_TOKENS = 1024
NEW_TOKENS = 512


def measure(rows: int, cached_pages: int, page_size: int, steps: int, hybrid: bool) -> dict[str, list[float]]:
    """Milliseconds of each part of each of `steps` steps, with the cache filled to `cached_pages` beforehand."""
    rng = random.Random(rows)
    limits = Limits(rows, 8192 + rows, PROMPT_TOKENS + NEW_TOKENS, page_size)
    live_pages = limits.logical_pages
    pool = PagePool(live_pages + cached_pages)
    grain = max(256 // page_size, 1) * page_size if hybrid else page_size
    cache = PrefixCache(pool, page_size, grain, SlotPool(2 * rows, "snapshot") if hybrid else None)
    scheduler = Scheduler(limits, pool, SlotPool(rows), prefix=cache, recurrent=hybrid)
    made = 0

    def submit(prompt_tokens: int, new_tokens: int) -> None:
        nonlocal made
        scheduler.submit(Request(made, [rng.randrange(100_000) for _ in range(prompt_tokens)], new_tokens))
        made += 1

    def step() -> tuple[float, float, float]:
        began = time.thread_time()
        plan = scheduler.schedule()
        assert plan is not None
        scheduled = time.thread_time()
        plan.batch(40, 8)
        plan.token_ids()
        _ = plan.slots
        batched = time.thread_time()
        scheduler.complete(plan, [7] * len(plan.sampling_rows))
        completed = time.thread_time()
        return (scheduled - began) * 1e3, (batched - scheduled) * 1e3, (completed - batched) * 1e3

    while len(cache) < cached_pages:
        submit(min(PROMPT_TOKENS, (cached_pages - len(cache)) * page_size + 1), 1)
        while scheduler.has_work:
            step()
    for row in range(rows):
        submit(PROMPT_TOKENS, NEW_TOKENS * (row + 1) // rows or 1)
    while scheduler.waiting or any(request.prefilling for request in scheduler.running):
        step()
    times: dict[str, list[float]] = {"schedule": [], "batch": [], "complete": [], "step": []}
    for _ in range(steps):
        for _ in range(rows - len(scheduler.running)):
            submit(64, NEW_TOKENS)
        parts = step()
        for name, value in zip(times, (*parts, sum(parts)), strict=True):
            times[name].append(value)
    return times


def main() -> None:
    """Print a table of medians, with the 99th percentile of the whole step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--cached-pages", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--hybrid", action="store_true")
    options = parser.parse_args()
    print("| rows | cached pages | schedule ms | batch ms | complete ms | step ms (p50) | step ms (p99) |")
    print("|---|---|---|---|---|---|---|")
    for rows in options.rows:
        for cached_pages in options.cached_pages:
            times = measure(rows, cached_pages, options.page_size, options.steps, options.hybrid)
            medians = [statistics.median(times[name]) for name in ("schedule", "batch", "complete", "step")]
            worst = statistics.quantiles(times["step"], n=100)[98]
            shown = " | ".join(f"{value:.3f}" for value in (*medians, worst))
            print(f"| {rows} | {cached_pages} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
