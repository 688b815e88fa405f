"""Many threads at once: nothing is lost, nothing hangs, memory stays flat."""

from __future__ import annotations

import faulthandler
import gc
import random
import threading
from pathlib import Path

import psutil
import pytest
from tests.support.runtimes import assert_at_rest

import trivet

LIMITS = trivet.Limits(max_requests=16, max_step_tokens=64, max_context=48, page_size=4)
THREADS, REQUESTS = 8, 2000


@pytest.mark.parametrize("kv_pages", [40])
def test_eight_threads_submit_and_cancel_two_thousand_requests(kv_pages: int, family_checkpoint: Path) -> None:
    faulthandler.dump_traceback_later(240, exit=False)
    process = psutil.Process()
    outcomes: list[str] = []
    resident: dict[int, int] = {}
    lock = threading.Lock()
    try:
        with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS, kv_pages=kv_pages) as runtime:

            def work(thread: int) -> None:
                rng = random.Random(thread)
                for _ in range(REQUESTS // THREADS):
                    prompt = [rng.randrange(97) for _ in range(rng.choice([1, 4, 9, 20]))]
                    request = runtime.submit(prompt, trivet.Sampling(max_new_tokens=rng.choice([1, 2, 5])))
                    if rng.random() < 0.3:
                        request.cancel()
                    assert request.wait(120), "a request hangs"
                    completion = request.completion
                    with lock:
                        outcomes.append(completion.finish_reason)
                        if len(outcomes) in (REQUESTS // 4, REQUESTS // 2, REQUESTS):
                            gc.collect()
                            resident[len(outcomes)] = process.memory_info().rss

            threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(200)
            assert not any(thread.is_alive() for thread in threads)
            assert len(outcomes) == REQUESTS
            assert set(outcomes) <= {"length", "cancelled"}
            runtime.run_until_idle()
            assert_at_rest(runtime)
            assert runtime.stats()["requests_finished"] == REQUESTS
            assert not runtime._engine._outputs and not runtime._engine._bound_slots
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert resident[REQUESTS] - resident[REQUESTS // 2] < 24 * 2**20, resident
