"""The ways in which the gate has the runtime serve sequences. Each shows that what it is about really happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from trivet.bench.prompts import drawn_prompts
from trivet.gate.session import Served, Session
from trivet.gate.settings import (
    BATCHED_PROMPTS,
    DECODES_BEFORE_DROP,
    FLOOR_PASS,
    LONG_PROMPTS,
    MIXED_DECODES,
    MIXED_NEW_TOKENS,
    SEQUENTIAL_PROMPTS,
    WARM_DECODES,
    WARM_MORE_TOKENS,
    WARM_TAILS,
    GateSettings,
    together_tokens,
)
from trivet.gate.sizes import Sizes

if TYPE_CHECKING:
    from trivet.runtime.handle import Request
    from trivet.runtime.runtime import Runtime

WARM_SNAPSHOTS = 8
"""Of recurrent state, with which none that `warm` starts from makes room: it has three requests open at most, each of
which keeps two and has one under way."""


@frozen
class Evidence:
    """What a pass brings back.

    Attributes:
        served: sequences to hold against the reference.
        faults: what did not happen though the pass is about it, or happened though it must not.
        notes: counts that show what happened.
    """

    served: Sequence[Served]
    faults: Sequence[str]
    notes: dict[str, int]


class Bench:
    """What the passes share: a runtime that nobody else drives, and prompts that no two of them have in common.

    Attributes:
        runtime: loaded without a thread of its own.
        settings, sizes: of this run.
    """

    def __init__(self, runtime: Runtime, settings: GateSettings, sizes: Sizes) -> None:
        self.runtime = runtime
        self.settings = settings
        self.sizes = sizes
        self._rng = np.random.default_rng(settings.seed)
        self._vocab_size = runtime._engine.blueprint.geometry.vocab_size

    def prompt(self, tokens: int) -> list[int]:
        """A prompt of so many drawn tokens."""
        return drawn_prompts(self._rng, [tokens], self._vocab_size)[0]

    def batch(self, requests: int) -> list[list[int]]:
        """As many prompts, of drawn lengths."""
        least, most = BATCHED_PROMPTS
        return [self.prompt(int(tokens)) for tokens in self._rng.integers(least, most + 1, requests)]

    def together(self, prompts: Sequence[Sequence[int]]) -> int:
        """New tokens with which `prompts`, submitted at once, come to decode side by side."""
        lengths = [len(prompt) for prompt in prompts]
        return together_tokens(self.settings.new_tokens, lengths, self.sizes.limits.max_step_tokens)

    def session(self) -> Session:
        """A session that finds nothing in the prefix cache."""
        prefix = self.runtime._engine.scheduler._holdings.prefix
        if prefix is not None:
            prefix.clear()
        return Session(self.runtime)

    @property
    def dtype(self) -> str:
        """What is served."""
        return self.runtime._engine.blueprint.capacity.dtype

    @property
    def graphs(self) -> bool:
        """Whether decode steps are captured."""
        return self.runtime._engine.graphs is not None

    @property
    def graph_steps(self) -> int:
        """Steps that were replayed from a graph so far."""
        return self.runtime._engine.graph_steps


Pass = Callable[[Bench], Evidence]


def sequential(bench: Bench) -> Evidence:
    """One request at a time, all of them twice: the two runs agree to the last bit."""
    prompts = [bench.prompt(tokens) for tokens in SEQUENTIAL_PROMPTS]
    runs, faults, replayed = [], [], bench.graph_steps
    for _ in range(2):
        served: list[Served] = []
        for prompt in prompts:
            session = bench.session()
            session.submit(prompt, bench.settings.new_tokens)
            served += session.finish()
            faults += session.faults
        runs.append(served)
    first, second = ([(one.token_ids, one.logprobs) for one in run] for run in runs)
    differing = sum(a != b for a, b in zip(first, second, strict=False)) + abs(len(first) - len(second))
    if differing:
        faults.append(f"{differing} of {len(prompts)} requests differ when they are served again")
    faults += _cold(runs[0]) + _cold(runs[1])
    notes = {"differing": differing, "graph_steps": bench.graph_steps - replayed}
    if bench.graphs and not notes["graph_steps"]:
        faults.append("no decode step was replayed from a CUDA graph, though graphs were captured")
    return Evidence(runs[0], faults, notes)


def batched(requests: int) -> Pass:
    """A pass of so many requests that decode side by side."""

    def run(bench: Bench) -> Evidence:
        session, replayed = bench.session(), bench.graph_steps
        prompts = bench.batch(requests)
        for prompt in prompts:
            session.submit(prompt, bench.together(prompts))
        served = session.finish()
        together = sum(report.path == "decode" and report.rows == requests for report in session.reports)
        faults = [*session.faults, *_cold(served)]
        if not together:
            faults.append(f"no step decoded {requests} rows at once")
        notes = {"steps_with_all_rows": together}
        if bench.graphs:
            notes["graph_steps"] = bench.graph_steps - replayed
            buckets = bench.runtime._engine.blueprint.capacity.graph_buckets
            if buckets and (requests in buckets or requests > buckets[-1]):
                faults.append(f"{requests} requests are not just past a bucket of CUDA graphs, which are {buckets}")
            if not notes["graph_steps"]:
                faults.append("no decode step was replayed from a CUDA graph, though graphs were captured")
        return Evidence(served, faults, notes)

    return run


def dropped(bench: Bench) -> Evidence:
    """A request is cancelled in the middle of a batch, and another one takes its place."""
    rows = bench.settings.batches[0]
    session = bench.session()
    prompts = bench.batch(rows)
    requests = [session.submit(prompt, bench.together(prompts) + DECODES_BEFORE_DROP) for prompt in prompts]
    decoded = 0
    while session.open and decoded < DECODES_BEFORE_DROP:
        report = session.step()
        decoded += report.path == "decode" and report.rows == rows
    victim = requests[rows // 2]
    slot = victim._scheduled.slot
    victim.cancel()
    after = [session.step() for _ in range(2)] if session.open else []
    late = session.submit(bench.prompt(BATCHED_PROMPTS[1]), 4)
    reused = False
    while session.open:
        session.step()
        reused = reused or late._scheduled.slot == slot
    served = session.finish()
    faults = list(session.faults)
    fewer = any(report.path == "decode" and report.rows == rows - 1 for report in after)
    if victim.completion.finish_reason != "cancelled" or not fewer:
        faults.append(f"dropping one of {rows} requests left no step of {rows - 1} rows")
    return Evidence(served, faults, {"rows_before": rows, "slot_reused": int(reused)})


def warm(bench: Bench) -> Evidence:
    """A prompt is served cold, then from the prefix cache; then one that begins like it, beside decoding requests."""
    grain_tokens = bench.runtime.stats()["prefix_grain_tokens"]
    tail, other_tail = WARM_TAILS
    prompt = bench.prompt(2 * grain_tokens + min(tail, grain_tokens))  # two grains, and not a third
    alike = prompt[: 2 * grain_tokens] + bench.prompt(other_tail)
    session = bench.session()
    for each in (prompt, prompt):
        session.submit(each, bench.settings.new_tokens)
        session.finish()
    new_tokens = bench.settings.new_tokens + WARM_MORE_TOKENS
    early = [session.submit(bench.prompt(tokens), new_tokens) for tokens in WARM_DECODES]
    while session.open and not all(_decoding(request) for request in early):
        session.step()
    session.submit(alike, bench.settings.new_tokens)
    before = len(session.reports)
    served = session.finish()
    faults = list(session.faults)
    cached = [one.cached_tokens for one in served]
    expected = [0, 2 * grain_tokens, 0, 0, 2 * grain_tokens]
    if cached != expected:
        faults.append(f"cached_tokens are {cached}, expected {expected}: a hit was missed, or there was one too many")
    beside = sum(report.path == "mixed" for report in session.reports[before:])
    if not beside:
        faults.append("no prompt started from the prefix cache in a mixed step")
    return Evidence(served, faults, {"hit_tokens": sum(cached), "mixed_steps": beside})


def mixed(bench: Bench) -> Evidence:
    """A prompt is computed in chunks beside requests that decode."""
    session = bench.session()
    prompt = bench.prompt(bench.sizes.mixed_prompt_tokens)
    early_prompts = [bench.prompt(tokens) for tokens in (5, 33, 100)[:MIXED_DECODES]]
    new_tokens = max(bench.together(early_prompts), MIXED_NEW_TOKENS)
    early = [session.submit(each, new_tokens) for each in early_prompts]
    while session.open and not all(_decoding(request) for request in early):
        session.step()
    late = session.submit(prompt, bench.settings.new_tokens)
    chunks = 0
    while session.open and not _decoding(late):
        report = session.step()
        chunks += report.path == "mixed" and report.decode_tokens == MIXED_DECODES
    served = session.finish()
    faults = list(session.faults)
    if chunks < 2:
        faults.append(f"a prompt of {len(prompt)} tokens took {chunks} mixed steps, expected at least 2")
    return Evidence(served, faults, {"mixed_steps": chunks})


def long_sequential(bench: Bench) -> Evidence:
    """Prompts of 4,097 and 8,192 tokens, one at a time."""
    served: list[Served] = []
    faults: list[str] = []
    for tokens in LONG_PROMPTS:
        session = bench.session()
        session.submit(bench.prompt(tokens), bench.settings.new_tokens)
        served += session.finish()
        faults += session.faults
        if sum(report.path == "prefill" for report in session.reports) < 2:
            faults.append(f"a prompt of {tokens} tokens was not computed in chunks")
    return Evidence(served, faults + _cold(served), {})


def long_batched(bench: Bench) -> Evidence:
    """The same lengths at once, with short requests beside them, decoding together."""
    session = bench.session()
    prompts = [bench.prompt(tokens) for tokens in (*LONG_PROMPTS, 5, 33, 100)]
    for prompt in prompts:
        session.submit(prompt, bench.together(prompts))
    served = session.finish()
    together = sum(report.path == "decode" and report.rows == len(prompts) for report in session.reports)
    faults = [*session.faults, *_cold(served)]
    if not together:
        faults.append(f"no step decoded {len(prompts)} rows at once")
    return Evidence(served, faults, {"steps_with_all_rows": together})


def left_out(bench: Bench) -> dict[str, str]:
    """Why passes cannot be served on this runtime, by name."""
    prefix = bench.runtime._engine.scheduler._holdings.prefix
    if prefix is None:
        return {"warm": "the prefix cache is off"}
    if prefix.snapshots is not None and prefix.snapshots.total < WARM_SNAPSHOTS:
        return {
            "warm": f"it wants {WARM_SNAPSHOTS} snapshots of recurrent state, and there are {prefix.snapshots.total}"
        }
    return {}


def passes_of(settings: GateSettings) -> dict[str, Pass]:
    """The passes by name, in the order in which they run."""
    found: dict[str, Pass] = {FLOOR_PASS: sequential}
    found |= {f"batched-{requests}": batched(requests) for requests in settings.batches}
    found |= {"dropped": dropped, "warm": warm, "mixed": mixed}
    if settings.long:
        found |= {"long-sequential": long_sequential, "long-batched": long_batched}
    return found


def _decoding(request: Request) -> bool:
    """Whether its whole prompt is computed."""
    return request._scheduled.computed_tokens >= request._scheduled.prompt_tokens


def _cold(served: Sequence[Served]) -> list[str]:
    hits = sum(one.cached_tokens > 0 for one in served)
    return [f"{hits} requests started from the prefix cache, which was empty"] if hits else []
