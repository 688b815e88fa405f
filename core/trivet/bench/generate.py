"""``trivet bench generate``: what a call of `Runtime.generate` costs: TPOT by batch, throughput, TTFT of long prompts.

Greedy, with prompts of drawn tokens. TPOT, the time per output token, is the mean time between the ends of consecutive
steps in which all requests of the call decode; such a step gives each of them one token. TTFT is the time to the first
token; of a call of many requests, until each has its first.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import asdict, frozen

from trivet.bench.figures import Figures, rounded, table
from trivet.bench.kernels import breakdown_record, kernel_table
from trivet.bench.loading import with_limits
from trivet.bench.profiling import PROFILED_STEPS, DecodeProfile, device_events, profiled_tokens
from trivet.bench.prompts import drawn_prompts
from trivet.bench.stepping import BenchmarkError
from trivet.bench.timeline import Breakdown
from trivet.plugin import hookimpl
from trivet.sampling.params import Sampling

if TYPE_CHECKING:
    from trivet.runtime.blueprint import Blueprint
    from trivet.runtime.results import Completion
    from trivet.runtime.runtime import Runtime
    from trivet.runtime.step import StepReport

    Hear = Callable[[StepReport], None]

WARM_NEW_TOKENS = 8
WARM_RUNS = 2
CACHED_PREFIX_REST = 16
LAST_STEP_S = 5.0
LEAST_NEW_TOKENS = 4
EMBEDDING = "embedding.weight"
"""What `trivet.weights.standard.embeddings` calls the token embedding."""

Report = Callable[[str], None]


@frozen
class GenerateSettings:
    """What is generated.

    Attributes:
        model: a checkpoint, or the name of a shipped model or geometry.
        batches: requests of a call, one figure for each.
        prompt_tokens, new_tokens: of each request.
        repeats: calls of each batch.
        many: requests of the throughput call; 0 for none.
        many_new_tokens: their new tokens.
        long_prompts: lengths whose TTFT is wanted.
        cached_prefixes: lengths whose TTFT is wanted of prompts that have `CACHED_PREFIX_REST` tokens more, and whose
            beginning is in the prefix cache, as far as the cache's grain allows; the rest is computed.
        kernels: whether to break a decode step of each batch, and a call of each long prompt, down by kernel (CUDA).
        seed: of the prompts.
        load: further arguments of `Runtime.load`; limits as a mapping of those that were asked for.
    """

    model: str
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    repeats: int
    many: int
    many_new_tokens: int
    long_prompts: tuple[int, ...]
    cached_prefixes: tuple[int, ...]
    kernels: bool
    seed: int
    load: Mapping[str, Any]


def bench_generate(settings: GenerateSettings, report: Report) -> dict[str, Any]:
    """Generate; tells `report` the tables, and returns what a record keeps."""
    from trivet.runtime.runtime import Runtime

    _require_possible(settings)
    new_tokens = max(settings.new_tokens, settings.many_new_tokens, WARM_NEW_TOKENS)
    if settings.kernels:
        step_tokens = with_limits(settings.load, max(settings.batches), 1)["limits"].max_step_tokens
        profiled = (profiled_tokens(batch, settings.prompt_tokens, step_tokens) for batch in settings.batches)
        new_tokens = max(new_tokens, *profiled)
    prompts = (*settings.long_prompts, *(tokens + CACHED_PREFIX_REST for tokens in settings.cached_prefixes))
    context = max(settings.prompt_tokens + new_tokens, *(tokens + 1 for tokens in prompts), 1)
    load = with_limits(settings.load, max(settings.batches), context)
    rng = np.random.default_rng(settings.seed)
    results: dict[str, Any] = {"batches": []}
    with Runtime.load(settings.model, **load) as runtime:
        _require_grain(runtime.stats()["prefix_grain_tokens"], settings)
        caller = Caller(runtime, rng)
        for batch in settings.batches:
            results["batches"].append(_tpot(caller, settings, batch))
        if settings.batches:
            rows = [(entry["batch"], *_row(entry)) for entry in results["batches"]]
            header = ("batch", "TPOT ms", "p50", "p95", "p99", "tok/s of the call", "TTFT ms")
            report(f"prompts of {settings.prompt_tokens}, {settings.new_tokens} new\n{table(header, rows)}")
        if settings.many:
            results["throughput"] = _throughput(caller, settings, report)
        if settings.long_prompts:
            results["ttft"] = _ttft(caller, settings, report)
        if settings.cached_prefixes:
            results["warm_ttft"] = _warm_ttft(caller, settings, report)
        if settings.kernels:
            tpot_us = {entry["batch"]: entry["medians"]["mean"] * 1e3 for entry in results["batches"]}
            results["kernels"], failures = [], []
            for entries in (
                _step_kernels(caller, settings, tpot_us, report),
                _prompt_kernels(caller, settings, report),
            ):
                try:
                    for entry in entries:
                        results["kernels"].append(entry)
                except Exception as error:  # what was measured before stands
                    told = isinstance(error, BenchmarkError)
                    failures.append(str(error) if told else f"{type(error).__name__}: {error}")
            if failures:
                results["failure"] = "; ".join(failures)
        results["stats"] = runtime.stats()
    return results


def _require_possible(settings: GenerateSettings) -> None:
    """Refuse what cannot be measured, before anything is loaded.

    Raises:
        BenchmarkError: kernels without CUDA, fewer requests at once than a batch has, or too few new tokens.
    """
    from trivet.runtime.device import resolve_device

    device, _ = resolve_device(settings.load.get("device"))
    if settings.kernels and device.type != "cuda":
        raise BenchmarkError(f"the kernels of a {device.type} cannot be told apart: leave --kernels out")
    limits, batch = settings.load.get("limits", {}), max(settings.batches)
    for name, what in (("max_requests", "requests at once"), ("max_step_tokens", "tokens in a step")):
        allowed = limits.get(name)
        if allowed is not None and allowed < batch:
            raise BenchmarkError(f"a batch of {batch} never decodes together: {name} allows {allowed} {what}")
    if settings.new_tokens < LEAST_NEW_TOKENS:
        raise BenchmarkError(
            f"{settings.new_tokens} new tokens have no two decode steps between them: expected {LEAST_NEW_TOKENS} at "
            "least"
        )


def _require_grain(grain_tokens: int, settings: GenerateSettings) -> None:
    """Refuse prefixes that are shorter than what the prefix cache shares, before anything is timed."""
    for prefix_tokens in settings.cached_prefixes:
        if prefix_tokens < grain_tokens:
            raise BenchmarkError(
                f"a prefix of {prefix_tokens} tokens is never found in the prefix cache: hits are multiples of "
                f"{grain_tokens} tokens"
            )


class Caller:
    """Calls `Runtime.generate` with drawn prompts, and hears its steps."""

    def __init__(self, runtime: Runtime, rng: np.random.Generator) -> None:
        self.runtime = runtime
        self.vocab_size = runtime._engine.blueprint.geometry.vocab_size
        self._rng = rng

    def call(
        self, requests: int, prompt_tokens: int, new_tokens: int, hear: Hear | None = None
    ) -> tuple[float, list[tuple[float, StepReport]]]:
        """Seconds of the call, and its steps with the times at which they ended; `hear` is told of each as it ends."""
        prompts = self.drawn([prompt_tokens] * requests)
        sampling = Sampling(max_new_tokens=new_tokens, ignore_eos=True)
        with heard_steps(self.runtime, hear) as steps:
            started = time.perf_counter()
            outs = self.runtime.generate(prompts, sampling)
            seconds = time.perf_counter() - started
            self._hear_all(steps, sum(len(out.token_ids) for out in outs))
        if any(len(out.token_ids) != new_tokens for out in outs):
            raise BenchmarkError(f"a request ended early: {outs[0].finish_reason}, {outs[0].error}")
        return seconds, [(ended - started, step) for ended, step in steps]

    def drawn(self, lengths: Sequence[int]) -> list[list[int]]:
        """Prompts of these lengths."""
        return drawn_prompts(self._rng, lengths, self.vocab_size)

    def _hear_all(self, steps: Sequence[tuple[float, StepReport]], tokens: int) -> None:
        """Wait for the last step, which is heard after its tokens are given."""
        give_up = time.perf_counter() + LAST_STEP_S
        while sum(step.new_tokens for _, step in steps) < tokens:
            if time.perf_counter() > give_up:
                raise BenchmarkError(f"the steps of a call gave fewer than its {tokens} tokens")
            time.sleep(1e-3)


@contextmanager
def heard_steps(runtime: Runtime, hear: Hear | None = None) -> Iterator[list[tuple[float, StepReport]]]:
    """The steps that `runtime` makes meanwhile, each with the time at which it ended.

    Args:
        runtime: whose steps are heard, beside whatever observes them anyway.
        hear: told of each step, on the thread that makes it.
    """
    steps: list[tuple[float, StepReport]] = []
    plugins = runtime._plugins

    class Listener:
        @hookimpl
        def trivet_observe_step(self, report: StepReport) -> None:
            steps.append((time.perf_counter(), report))
            if hear is not None:
                hear(report)

    runtime._plugins = plugins.observed_by([Listener()])
    try:
        yield steps
    finally:
        runtime._plugins = plugins


def decode_gaps_ms(steps: Sequence[tuple[float, StepReport]], rows: int) -> list[float]:
    """Times between the ends of consecutive decode steps of `rows` rows."""
    gaps = []
    for (before, earlier), (now, later) in itertools.pairwise(steps):
        if earlier.path == later.path == "decode" and earlier.rows == later.rows == rows:
            gaps.append((now - before) * 1e3)
    return gaps


def seconds_by_path(steps: Sequence[tuple[float, StepReport]]) -> dict[str, tuple[int, float]]:
    """By path, how many of `steps` took it, and the seconds from the step before to their ends."""
    totals: dict[str, tuple[int, float]] = {}
    before = 0.0
    for ended, step in steps:
        count, seconds = totals.get(step.path, (0, 0.0))
        totals[step.path] = (count + 1, seconds + ended - before)
        before = ended
    return totals


def _tpot(caller: Caller, settings: GenerateSettings, batch: int) -> dict[str, Any]:
    caller.call(batch, settings.prompt_tokens, WARM_NEW_TOKENS)
    calls: list[dict[str, Any]] = []
    for _ in range(settings.repeats):
        seconds, steps = caller.call(batch, settings.prompt_tokens, settings.new_tokens)
        gaps = decode_gaps_ms(steps, batch)
        if not gaps:
            raise BenchmarkError(f"no two consecutive steps had all {batch} requests decoding")
        first_ms = next(ended for ended, step in steps if step.new_tokens) * 1e3
        all_first_ms = max(ended for ended, step in steps if step.prefill_tokens) * 1e3
        call = {"seconds": seconds, "ttft_ms": first_ms, "all_ttft_ms": all_first_ms, "gaps_ms": rounded(gaps)}
        calls.append(call)
    figures = [asdict(Figures.of(call["gaps_ms"])) for call in calls]
    medians = {name: statistics.median(f[name] for f in figures) for name in ("mean", "p50", "p95", "p99")}
    return {"batch": batch, "new_tokens": settings.new_tokens, "calls": calls, "figures": figures, "medians": medians}


def _row(entry: Mapping[str, Any]) -> tuple[float, ...]:
    medians, calls = entry["medians"], entry["calls"]
    tokens = entry["batch"] * entry["new_tokens"]
    rate = statistics.median(tokens / call["seconds"] for call in calls)
    first = statistics.median(call["all_ttft_ms"] for call in calls)
    return (medians["mean"], medians["p50"], medians["p95"], medians["p99"], rate, first)


def _throughput(caller: Caller, settings: GenerateSettings, report: Report) -> dict[str, Any]:
    caller.call(min(settings.many, max(settings.batches)), settings.prompt_tokens, WARM_NEW_TOKENS)
    rates, seconds, paths = [], [], []
    for _ in range(settings.repeats):
        took, steps = caller.call(settings.many, settings.prompt_tokens, settings.many_new_tokens)
        seconds.append(took)
        paths.append(seconds_by_path(steps))
        rates.append(settings.many * settings.many_new_tokens / took)
    report(
        f"{settings.many} requests of {settings.prompt_tokens} and {settings.many_new_tokens} tokens: "
        f"{statistics.median(rates):.0f} tok/s (median of {', '.join(f'{rate:.0f}' for rate in rates)})"
    )
    report(", ".join(f"{count} {path} steps {took:.2f} s" for path, (count, took) in paths[-1].items()))
    return {"requests": settings.many, "seconds": seconds, "tokens_per_second": rates, "steps_by_path": paths}


def _ttft(caller: Caller, settings: GenerateSettings, report: Report) -> list[dict[str, Any]]:
    entries = []
    for prompt_tokens in settings.long_prompts:
        caller.call(1, prompt_tokens, 1)
        times = [caller.call(1, prompt_tokens, 1)[0] * 1e3 for _ in range(max(3, settings.repeats))]
        report(f"TTFT of {prompt_tokens} tokens: {statistics.median(times):.1f} ms (least {min(times):.1f})")
        entries.append({"prompt_tokens": prompt_tokens, "ttft_ms": rounded(times)})
    return entries


def _warm_ttft(caller: Caller, settings: GenerateSettings, report: Report) -> list[dict[str, Any]]:
    entries = []
    for prefix_tokens in settings.cached_prefixes:
        (prefix,) = caller.drawn([prefix_tokens])
        runs = []
        for _ in range(1 + WARM_RUNS + max(3, settings.repeats)):  # the first leaves the prefix
            runs.append(_timed_prompt(caller.runtime, [*prefix, *caller.drawn([CACHED_PREFIX_REST])[0]]))
        (cold_ms, _), measured = runs[0], runs[1 + WARM_RUNS :]
        times = [ms for ms, _ in measured]
        cached = _cached_tokens(caller.runtime, prefix_tokens, [out for _, out in measured])
        rest = measured[0][1].prompt_tokens - cached
        cut = "" if cached == prefix_tokens else f", which the cache's grain leaves of a prefix of {prefix_tokens}"
        report(
            f"TTFT of {rest} tokens behind {cached} cached ones{cut}: {statistics.median(times):.1f} ms "
            f"(least {min(times):.1f}; the first time {cold_ms:.1f})"
        )
        entries.append(
            {
                "prefix_tokens": prefix_tokens,
                "cached_tokens": cached,
                "rest_tokens": rest,
                "ttft_ms": rounded(times),
                "cold_ttft_ms": cold_ms,
            }
        )
    return entries


def _timed_prompt(runtime: Runtime, prompt: Sequence[int]) -> tuple[float, Completion]:
    """Milliseconds until the one new token of `prompt`, and its completion."""
    started = time.perf_counter()
    (out,) = runtime.generate([list(prompt)], Sampling(max_new_tokens=1, ignore_eos=True))
    took_ms = (time.perf_counter() - started) * 1e3
    if len(out.token_ids) != 1:
        raise BenchmarkError(f"a request ended early: {out.finish_reason}, {out.error}")
    return took_ms, out


def _cached_tokens(runtime: Runtime, prefix_tokens: int, outs: Sequence[Completion]) -> int:
    """Tokens of the prefix that each of `outs` found in the prefix cache.

    Raises:
        BenchmarkError: none were found, or not by each as many.
    """
    found = sorted({out.cached_tokens for out in outs})
    grain = f"hits are multiples of {runtime.stats()['prefix_grain_tokens']} tokens"
    if found[0] == 0:
        raise BenchmarkError(f"a prefix of {prefix_tokens} tokens was not found in the prefix cache: {grain}")
    if len(found) > 1:
        raise BenchmarkError(
            f"of a prefix of {prefix_tokens} tokens, {' and '.join(map(str, found))} were found in the prefix cache, "
            f"expected the same in each run: {grain}"
        )
    return found[0]


def _step_kernels(
    caller: Caller, settings: GenerateSettings, tpot_us: Mapping[int, float], report: Report
) -> Iterator[dict[str, Any]]:
    engine = caller.runtime._engine
    step_tokens = engine.scheduler.limits.max_step_tokens
    with device_events(engine.inputs.device):  # the profiler sets itself up, on the thread that its library expects
        caller.call(1, settings.prompt_tokens, WARM_NEW_TOKENS)
    for batch in settings.batches:
        profile = DecodeProfile(engine, batch)
        new_tokens = profiled_tokens(batch, settings.prompt_tokens, step_tokens)
        caller.call(batch, settings.prompt_tokens, new_tokens, profile.hear)
        breakdown = profile.breakdown()
        entry = {
            "batch": batch,
            "steps": PROFILED_STEPS,
            "graph_steps": profile.graph_steps,
            **_weights_read(engine.blueprint, breakdown),
            **breakdown_record(breakdown),
        }
        report(f"batch {batch}, a decode step by kernel\n{kernel_table(breakdown, PROFILED_STEPS)}")
        report(
            f"weights of {entry['weight_bytes'] / 1e9:.2f} GB, {entry['weight_tb_per_s']:.2f} TB/s over that step; "
            f"without the profiler a step took {tpot_us[batch]:.1f} us"
        )
        yield entry


def _weights_read(blueprint: Blueprint, breakdown: Breakdown) -> dict[str, float]:
    """Bytes of weights that a decode step reads, each once, and what that is over the time of a step.

    Of an embedding that is not the output projection as well, a step reads a row for each token, which is nothing.
    """
    tied = blueprint.geometry.tied_embeddings
    weight_bytes = sum(spec.bytes for spec in blueprint.weights.specs if tied or spec.name != EMBEDDING)
    return {"weight_bytes": weight_bytes, "weight_tb_per_s": weight_bytes * PROFILED_STEPS / breakdown.span_us / 1e6}


def _prompt_kernels(caller: Caller, settings: GenerateSettings, report: Report) -> Iterator[dict[str, Any]]:
    for prompt_tokens in settings.long_prompts:
        with device_events(caller.runtime._engine.inputs.device) as events:
            seconds, steps = caller.call(1, prompt_tokens, 1)
        breakdown = Breakdown.of(events)
        entry = {"prompt_tokens": prompt_tokens, "seconds": seconds, "steps": len(steps)}
        report(
            f"prompt of {prompt_tokens} tokens by kernel, steps: {len(steps)}, {seconds * 1e3:.1f} ms\n"
            f"{kernel_table(breakdown, 1, 'call')}"
        )
        yield {**entry, **breakdown_record(breakdown)}
