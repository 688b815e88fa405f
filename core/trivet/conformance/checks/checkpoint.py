"""The promises that a real checkpoint can show: it loads, serves, repeats itself, and warm equals cold."""

from __future__ import annotations

from pathlib import Path

import trivet
from trivet.capacity import Limits
from trivet.config.document import ConfigDocument
from trivet.conformance.bench import Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.checks.prefix import WARM_CAUSE
from trivet.conformance.failure import NotRun, expect
from trivet.conformance.served import Served
from trivet.sampling.params import Sampling

LIMITS = Limits(max_requests=4, max_step_tokens=256, max_context=512, page_size=16)
GREEDY = Sampling(max_new_tokens=24, logprobs=4)


def _model(bench: Bench) -> Path:
    if bench.model is None:
        raise NotRun("no checkpoint was given: --model DIR")
    return bench.model


def _prompts(served: Served, bench: Bench) -> list[list[int]]:
    vocabulary = served.engine.blueprint.geometry.vocab_size
    rng = bench.rng("checkpoint")
    return [[int(token) for token in rng.integers(0, vocabulary, n)] for n in (3, 40, 131)]


@check(
    "checkpoint.loads-as-planned/1",
    "checkpoint",
    "The checkpoint is of this model type, and loads into exactly the memory that was planned from its config.json.",
    cause="the checkpoint does not hold what its config promises",
)
def loads_as_planned(bench: Bench) -> Measured:
    directory = _model(bench)
    found = ConfigDocument.read(directory).model_type
    expect(
        found == bench.model_type,
        observed=f"{directory} has model_type {found!r}",
        expected=f"{bench.model_type!r}",
        cause="the checkpoint given is another family's",
    )
    with bench.serve(directory, limits=LIMITS, kv_pages=96, dtype=None) as served:
        loaded = served.runtime.memory
    if bench.device == "cpu":
        planned = trivet.plan_memory(directory, "cpu", limits=LIMITS, kv_pages=96)
        expect(
            planned.as_json() == loaded.as_json(),
            observed=f"planned {planned.total_bytes} bytes",
            expected=f"the {loaded.total_bytes} bytes of the loaded runtime, line by line",
            cause="a size depends on something that is known only after loading",
        )
    return {"total_bytes": float(loaded.total_bytes)}


@check(
    "checkpoint.serves-and-repeats/1",
    "checkpoint",
    "It answers several requests at once with finite log-probabilities, and the same run again is bit-identical.",
    cause="the model raises on real weights",
)
def serves_and_repeats(bench: Bench) -> Measured:
    directory = _model(bench)
    runs = []
    for _ in range(2):
        with bench.serve(directory, limits=LIMITS, kv_pages=96, dtype=None) as served:
            answers = served.generate(_prompts(served, bench), GREEDY)
            runs.append([(answer.token_ids, answer.logprobs) for answer in answers])
    lowest = min(entry.logprob for _, logprobs in runs[0] for entry in logprobs or ())
    expect(
        runs[0] == runs[1] and lowest > float("-inf"),
        observed=f"equal: {[a == b for a, b in zip(*runs, strict=True)]}, lowest log-probability {lowest:.3g}",
        expected="two equal runs of finite numbers",
        cause="uninitialised memory is read, or an order depends on the process",
    )
    return {"lowest_logprob_nats": lowest}


@check(
    "checkpoint.warm-is-cold/1",
    "checkpoint",
    "A rerun from the prefix cache gives the same tokens.",
    capability="prefix_cache",
    cause="a warm start raises",
)
def warm_is_cold(bench: Bench) -> Measured:
    with bench.serve(_model(bench), limits=LIMITS, kv_pages=96, dtype=None) as served:
        prompt = _prompts(served, bench)[2]
        cold, hit = (served.generate([prompt], GREEDY)[0] for _ in range(2))
    expect(
        hit.cached_tokens > 0 and hit.token_ids == cold.token_ids,
        observed=f"{hit.cached_tokens} tokens from the cache, then {list(hit.token_ids)}",
        expected=f"a hit, then {list(cold.token_ids)}",
        cause=WARM_CAUSE,
    )
    return {"cached_tokens": float(hit.cached_tokens)}


CHECKS = (loads_as_planned, serves_and_repeats, warm_is_cold)
