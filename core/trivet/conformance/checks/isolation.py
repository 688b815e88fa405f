"""Memory: a row reads and writes its own pages and its own slot, and nothing else."""

from __future__ import annotations

from typing import Any

import torch

from trivet.capacity import Limits
from trivet.conformance.bench import Bench, differing
from trivet.conformance.check import Measured, check
from trivet.conformance.checks.prefix import farthest_apart
from trivet.conformance.failure import expect
from trivet.conformance.served import Served, said
from trivet.conformance.tolerances import bound_of
from trivet.runtime.results import Completion
from trivet.sampling.params import Sampling

MIXING_CAUSE = (
    "a layer mixes rows: a mean, a maximum, a norm, a scale or a shift is taken over the token dimension, across rows, "
    "or a row reads pages, positions or a state that are another's"
)
PLACE_CAUSE = (
    "what a row computes depends on its place in the step or on how many rows there are: a row is found by its number "
    "instead of by query_lengths, a reduction runs over the whole step, or a branch asks how many tokens a step has"
)


@check(
    "isolation.poison-is-not-read/1",
    "protocol",
    "Nothing of free pages, page tails, free slots or padding reaches a live row: with all of them NaN from the start, "
    "every token and log-probability is the same.",
    cause="memory that no live row owns is read",
)
def poison_is_not_read(bench: Bench) -> None:
    rng = bench.rng("poison")
    prompts = [bench.tokens(rng, int(n)) for n in rng.integers(1, 40, 6)]
    sampling = Sampling(max_new_tokens=8, logprobs=4)
    answers, runs = [], []
    for poisoned in (False, True):
        with bench.serve() as served:
            if poisoned:
                _poison(served)
            requests = [served.submit(prompt, sampling) for prompt in prompts]
            served.finish(requests)
            answers.append([request.completion for request in requests])
            runs.append(said(answers[-1]))
    place = min(differing(runs[0], runs[1]), len(prompts) - 1)
    expect(
        runs[0] == runs[1],
        observed=f"with NaN in every page and slot that no request owns, the request of {len(prompts[place])} prompt "
        f"tokens {_told_apart(answers[1][place], answers[0][place])}",
        expected="the tokens, the log-probabilities and the end of a run without NaN, bit for bit",
        cause="attention reads past a row's context (a page tail, a free or padding page), or a recurrent slot is used "
        "before it is cleared",
    )


def _told_apart(found: Completion, expected: Completion) -> str:
    """How an answer differs from the one that was expected, or that it does not."""
    place = differing(found.token_ids, expected.token_ids)
    if found.token_ids != expected.token_ids:
        said = [list(answer.token_ids[place : place + 4]) for answer in (found, expected)]
        return f"says other tokens from new token {place} on: {said[0]}, not {said[1]}"
    if found.finish_reason != expected.finish_reason:
        return f"says the same tokens and ends by {found.finish_reason!r}, not {expected.finish_reason!r}"
    where = differing(found.logprobs or (), expected.logprobs or ())
    if where == place:
        return "says the same"
    return (
        f"says the same tokens, with log-probabilities that differ by up to {farthest_apart(found, expected):.3g} nat, "
        f"first at new token {where}"
    )


def _poison(served: Served) -> None:
    engine = served.engine
    buffers = [engine.cache.buffers]
    if engine.state is not None:
        buffers += [engine.state.slots, engine.state.snapshots]
    for held in buffers:
        for spec in held.layout.specs:
            held[spec.name].fill_(float("nan"))


@check(
    "isolation.writes-only-its-own/1",
    "protocol",
    "A step writes the keys and values of its rows' new tokens, and the recurrent states of its rows' slots, and "
    "nothing else: other pages and slots keep every bit.",
    cause="a step writes where none of its rows lies",
)
def writes_only_its_own(bench: Bench) -> Measured:
    rng = bench.rng("writes")
    steps = 0
    for tiny in bench.tinies:
        with bench.serve(tiny, prefix_cache=False) as served:
            engine = served.engine
            page_size = engine.blueprint.capacity.limits.page_size
            padding_page = engine.blueprint.ledger.kv_pages
            for spec in engine.cache.buffers.layout.specs:
                engine.cache.buffers[spec.name].fill_(7.0)  # a runtime before may have left the very same numbers
            requests = [served.submit(bench.tokens(rng, n, tiny), Sampling(max_new_tokens=6)) for n in (9, 3, 17, 30)]
            requests[0].cancel()  # so that the first slot is free while others are live
            while not all(request.done for request in requests):
                before = _held(served)
                running = {id(r): (r, r.computed_tokens) for r in engine.scheduler.running}
                served.step()
                rows = [(r, running[id(r)][1]) for r in engine.scheduler.running if id(r) in running]
                ended = len(rows) < len(running) or any(r.cached_tokens for r, _ in rows)
                fresh = [r for r in engine.scheduler.running if id(r) not in running]
                if ended:
                    continue  # what ended rows wrote can no longer be told
                rows += [(r, 0) for r in fresh]
                _require_own(_held(served), before, rows, page_size, padding_page, tiny.name)
                steps += 1
    return {"steps": float(steps)}


def _held(served: Served) -> dict[str, torch.Tensor]:
    """Copies of every page and slot."""
    engine = served.engine
    held = {}
    geometry = engine.blueprint.geometry
    for layer in geometry.attention_layers:
        for kind, tensor in zip(("keys", "values"), engine.cache.layer(layer), strict=True):
            held[f"{kind} {layer}"] = tensor.clone()
    if engine.state is not None:
        for layer in geometry.recurrent_layers:
            held[f"recurrent state {layer}"] = engine.state.recurrent(layer).clone()
            held[f"convolution tail {layer}"] = engine.state.tail(layer).clone()
    return held


def _require_own(
    after: dict[str, torch.Tensor],
    before: dict[str, torch.Tensor],
    rows: list[tuple[Any, int]],
    page_size: int,
    padding_page: int,
    config: str,
) -> None:
    entries = {
        (request.pages[position // page_size], position % page_size)
        for request, first in rows
        for position in range(first, request.computed_tokens)
    }
    moved = [(request, first) for request, first in rows if request.computed_tokens > first]
    slots = {request.slot for request, _ in moved}
    for name, tensor in after.items():
        same = (tensor == before[name]) | (tensor.isnan() & before[name].isnan())
        if name.startswith(("keys", "values")):
            changed = {(int(p), int(o)) for p, o in (~same.flatten(2).all(-1)).nonzero().tolist()}
            strange = {place for place in changed - entries if place[0] != padding_page}
            lost = entries - changed
            expect(
                not strange and not lost,
                observed=f"config {config!r}, {name}: entries (page, offset) {sorted(strange)[:4]} were written though "
                f"no row computed them, and {sorted(lost)[:4]} were not though one did",
                expected=f"exactly the {len(entries)} entries of the step's new tokens",
                cause="a token's cache slot is computed from the wrong page, offset or row, or padding writes into a "
                "page of the pool",
            )
        else:
            last = tensor.shape[0] - 1
            written = set((~same.flatten(1).all(-1)).nonzero().flatten().tolist())
            expect(
                written - {last} <= slots and (slots <= written or not tensor[0].numel()),
                observed=f"config {config!r}, {name}: slots {sorted(written)} were written in a step of rows with "
                f"slots {sorted(slots)}",
                expected="the slots of the step's rows, each of them",
                cause="states are written by row instead of by slot, dropped after the step, or padding rows write "
                "into a live slot",
            )


@check(
    "isolation.rows-do-not-mix/1",
    "protocol",
    "What a request is told does not depend on the requests beside it: alone, beside others, and beside others of the "
    "same lengths and other tokens, in whichever row, its log-probabilities are the same but for rounding.",
    cause="a step over several rows raises",
)
def rows_do_not_mix(bench: Bench) -> Measured:
    rng = bench.rng("mix")
    bound = bound_of("logprob-max", bench.device, "float32")
    most = 0.0
    for tiny in bench.tinies:
        prompt = bench.tokens(rng, 7, tiny)
        beside = [[bench.tokens(rng, n, tiny) for n in (5, 11, 1)] for _ in range(2)]
        # As many tokens of each as fit into one step: the rows meet in prefill and in every decode step.
        sampling = Sampling(max_new_tokens=4, logprobs=tiny.vocab_size)
        with bench.serve(tiny, prefix_cache=False, limits=Limits(4, 96, 96, 4)) as served:
            (alone,) = served.generate([prompt], sampling)
            for row in (0, 2):
                answers = []
                for others in beside:
                    prompts = [*others[:row], prompt, *others[row:]]
                    answers.append(served.generate(prompts, sampling)[row])
                changed = _apart(answers[1], answers[0])
                apart = max(changed, *(_apart(answer, alone) for answer in answers))
                most = max(most, apart)
                expect(
                    apart <= bound,
                    observed=f"config {tiny.name!r}, row {row} of a step of 4 rows: log-probabilities are off by up to "
                    f"{apart:.3g} nat from those of the same row alone, and by {changed:.3g} nat where only the tokens "
                    "of the other rows change",
                    expected=f"at most {bound:.3g} nat",
                    cause=MIXING_CAUSE if changed > bound else PLACE_CAUSE,
                )
    return {"logprob_max_nats": most}


def _apart(found: Completion, expected: Completion) -> float:
    """Largest difference in nats, up to the first token that differs; infinite where something is not a number."""
    place = differing(found.token_ids, expected.token_ids)
    rows = zip((found.logprobs or ())[: place + 1], (expected.logprobs or ())[: place + 1], strict=False)
    apart = [abs(value - dict(theirs.top)[token]) for ours, theirs in rows for token, value in ours.top]
    return max((value if value == value else float("inf") for value in apart), default=float("inf"))


CHECKS = (poison_is_not_read, writes_only_its_own)
LATE_CHECKS = (rows_do_not_mix,)
"""Broader than those of recurrent states, which say of which tensor."""
