"""The same promises on a CUDA device, with the backend that serves there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from trivet.capacity import Limits
from trivet.conformance.bench import Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.checks.isolation import writes_only_its_own
from trivet.conformance.checks.numerics import attention
from trivet.conformance.checks.plan import no_allocation, pinned_policy, pointers_stable, refuses_what_is_too_large
from trivet.conformance.checks.prefix import WARM_CAUSE
from trivet.conformance.checks.serving import deterministic
from trivet.conformance.failure import broken, expect
from trivet.conformance.tiny import TinyModel
from trivet.sampling.params import Sampling

if TYPE_CHECKING:
    from trivet.runtime.results import Completion

SAMPLINGS = (
    Sampling(max_new_tokens=40),
    Sampling(max_new_tokens=40, temperature=0.8, seed=3),
    Sampling(max_new_tokens=40, temperature=0.8, seed=3, top_p=0.9, repetition_penalty=1.2, logprobs=4),
)
"""What decode steps are asked for: nothing drawn; drawn; ordered, penalised and reported."""

SHORT_PROMPTS = (1, 15, 17, 63)
"""Tokens of prompts: a token beside the sizes that are captured, 16 and 64, and the shortest."""
SHORT_PROMPT_LIMITS = Limits(max_requests=64, max_step_tokens=64, max_context=96, page_size=16)
"""A prompt's size is captured only where as many requests may decode at once."""
REPORTED = Sampling(max_new_tokens=8, logprobs=16)

DEVICE_LOGPROB_NATS = 0.3
"""On average over a vocabulary; bfloat16 rounding alone is a sixth of that in the tiny models."""
SHORT_PROMPT_NATS = 0.3
"""Of the tokens that two bfloat16 runs report: their attention rounds at other places. bfloat16 and float32 are up to
0.1 apart on a CPU, in the tiny models whose steps are captured."""


device_plan_no_allocation = evolve(no_allocation, id="device.plan-no-allocation/1", tier="device")
device_plan_pointers_stable = evolve(pointers_stable, id="device.plan-pointers-stable/1", tier="device")
device_plan_refuses_what_is_too_large = evolve(
    refuses_what_is_too_large, id="device.plan-refuses-what-is-too-large/1", tier="device"
)
device_attention = evolve(attention, id="device.attention/1", tier="device")


@check(
    "device.serves/1",
    "device",
    "On CUDA in bfloat16, every tiny model loads and serves, whole prompts and chunks; log-probabilities follow the "
    "CPU's in float32, which numerics has held against the oracle.",
    cause="a kernel of the selected path does not serve this geometry, though its predicate says so",
)
def serves(bench: Bench) -> Measured:
    most = 0.0
    for tiny in bench.tinies:
        tokens = bench.tokens(bench.rng("device"), 40, tiny)
        with bench.serve(tiny, device="cpu", dtype="float32") as served:
            expected = served.score(tokens)
        for step_tokens in (64, 7):
            with bench.serve(tiny, limits=Limits(2, step_tokens, 96, 16)) as served:
                apart = float((served.score(tokens) - expected).abs().nan_to_num(float("inf")).mean())
                paths = served.runtime.explain_paths()
            most = max(most, apart)
            expect(
                apart <= DEVICE_LOGPROB_NATS,
                observed=f"config {tiny.name!r}, in steps of {step_tokens}: off by {apart:.3g} nat on average from the "
                f"CPU; paths {paths}",
                expected=f"at most {DEVICE_LOGPROB_NATS} nat",
                cause="the device's path computes something else than the reference",
            )
    return {"logprob_mean_nats": most}


device_deterministic = evolve(deterministic, id="device.deterministic/1", tier="device")
device_writes_only_its_own = evolve(writes_only_its_own, id="device.writes-only-its-own/1", tier="device")


@check(
    "device.decode-allocates-nothing/2",
    "device",
    "A steady decode step makes no device allocation, by the allocator's own count, whatever is asked of the sampler.",
    capability="cuda_graphs",
    cause="a step allocates on the device",
)
def device_decode_allocates_nothing(bench: Bench) -> Measured:
    rng, total = bench.rng("decode"), 0
    tiny = _captured(bench)
    for sampling in SAMPLINGS:
        with bench.serve(tiny) as served:
            requests = [served.submit(bench.tokens(rng, 5, tiny), sampling) for _ in range(4)]
            for _ in range(8):
                served.step()
            before, steps = served.stats["device_allocations"], 0
            while not any(request.done for request in requests) and steps < 20:
                served.step()
                steps += 1
            grown, total = served.stats["device_allocations"] - before, total + steps
            expect(
                grown == 0 and steps > 0,
                observed=f"{grown} device allocations in {steps} decode steps of {sampling}",
                expected="none",
                cause="an owner plans afresh, a layer makes temporaries outside a graph, or the sampler allocates",
            )
    return {"steps": float(total)}


def _captured(bench: Bench) -> TinyModel:
    """The first tiny model whose decode steps are captured on this device."""
    for tiny in bench.tinies:
        with bench.serve(tiny) as served:
            if served.engine.graphs is not None:
                return tiny
    broken(
        observed=f"no decode steps are captured for any of the tiny models {[tiny.name for tiny in bench.tinies]}",
        expected="one at least whose decode path captures: its head dim and dtype are served by such a path",
        cause="the family brings no tiny model that a device's own decode paths serve (head dims 64, 128 and 256)",
    )


@check(
    "device.ledger-covers-the-peak/1",
    "device",
    "What the allocator held at most while loading and serving stays within the ledger's total.",
    cause="memory is used that no line reserves",
)
def device_ledger_covers_the_peak(bench: Bench) -> Measured:
    import torch

    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rng = bench.rng("peak")
    with bench.serve() as served:
        served.generate([bench.tokens(rng, 30) for _ in range(6)], Sampling(max_new_tokens=8, logprobs=4))
        served.score(bench.tokens(rng, 90))
        total = served.runtime.memory.total_bytes
    peak = torch.cuda.max_memory_allocated() - base
    expect(
        peak <= total,
        observed=f"{peak} bytes were allocated at once",
        expected=f"at most the ledger's {total}",
        cause="a workspace, a graph's pool or a layer's temporaries are not in the ledger",
    )
    return {"peak_bytes": float(peak), "ledger_bytes": float(total)}


@check(
    "device.graphs-change-nothing/2",
    "device",
    "Decoding through CUDA graphs gives the tokens of eager decoding, as contexts grow over pages and batches over "
    "buckets.",
    capability="cuda_graphs",
    cause="a captured step freezes something that changes",
)
def graphs_change_nothing(bench: Bench) -> Measured:
    rng, tiny = bench.rng("graphs"), _captured(bench)
    prompts = [bench.tokens(rng, int(n), tiny) for n in rng.integers(1, 30, 4)]
    for sampling in SAMPLINGS:
        answers = []
        for graphs in (False, True):
            with bench.serve(tiny, cuda_graphs=graphs) as served:
                answers.append(served.generate(prompts, sampling))
        for eager, replayed in zip(*answers, strict=True):
            expect(
                eager.token_ids == replayed.token_ids,
                observed=f"{list(replayed.token_ids)} through graphs, by {sampling}",
                expected=f"{list(eager.token_ids)}, as without",
                cause="the graph was captured with lengths, pages or offsets of its capture: refill the plan in place "
                "before each replay",
            )
    return {"requests": float(len(prompts) * len(SAMPLINGS))}


@check(
    "device.short-prompts-replay/1",
    "device",
    "A short prompt that is served through a captured step gives the tokens that it gives without, unless two are "
    "about as likely, and nearly the same log-probabilities.",
    capability="cuda_graphs",
    cause="a captured step freezes something that changes",
)
def short_prompts_replay(bench: Bench) -> Measured:
    rng, tiny = bench.rng("short-prompts"), _captured(bench)
    prompts = [bench.tokens(rng, tokens, tiny) for tokens in SHORT_PROMPTS]
    answers, replayed = [], 0
    for graphs in (False, True):
        with bench.serve(tiny, limits=SHORT_PROMPT_LIMITS, cuda_graphs=graphs, prefix_cache=False) as served:
            requests, replayed = [], 0
            for prompt in prompts:  # each alone: a step of several is not replayed
                before = served.stats["graph_steps"]
                requests.append(served.submit(prompt, REPORTED))
                served.step()
                replayed += served.stats["graph_steps"] - before
                served.finish(requests[-1:])
                error = requests[-1].completion.error
                expect(
                    error is None,
                    observed=f"a prompt of {len(prompt)} tokens ended with {type(error).__name__}: {error}, with "
                    f"cuda_graphs={graphs}",
                    expected="an answer",
                    cause="the family's layers raise in a captured step, or its logits are not finite there",
                )
            # Layers that take the rows of a step from the host are never captured for a prompt.
            expected = len(prompts) if graphs and served.engine.blueprint.capacity.prompt_buckets else 0
            expect(
                replayed == expected,
                observed=f"{replayed} of the steps of prompts of {SHORT_PROMPTS} tokens were replayed, with "
                f"cuda_graphs={graphs}",
                expected=str(expected),
                cause="no step of a short prompt was captured, or the prompt was divided",
            )
            answers.append([request.completion for request in requests])
    most = 0.0
    for prompt, eager, captured in zip(prompts, *answers, strict=True):
        apart = _apart_nats(eager, captured)
        most = max(most, apart)
        expect(
            apart <= SHORT_PROMPT_NATS,
            observed=f"{list(captured.token_ids)} behind a replayed prompt of {len(prompt)} tokens, log-probabilities "
            f"off by up to {apart:.3g} nat",
            expected=f"{list(eager.token_ids)}, as without graphs, and at most {SHORT_PROMPT_NATS} nat",
            cause="the graph was captured with the context, pages or chunks of its capture, or padding tokens reach "
            "the prompt's own: refill plans and tables in place before each replay",
        )
    return {"replayed": float(replayed), "logprob_nats": most}


def _apart_nats(eager: Completion, other: Completion) -> float:
    """The most that two answers are apart, up to the first place where their tokens are not the same.

    Of tokens that both report, log-probabilities; where the tokens part, also how much less likely than `eager`'s the
    other one is, which is infinite if `eager` does not report it.
    """
    most = 0.0
    assert eager.logprobs is not None and other.logprobs is not None
    for ours, theirs in zip(eager.logprobs, other.logprobs, strict=False):  # an end token ends one of them earlier
        expected, found = dict(ours.top), dict(theirs.top)
        most = max(most, *(abs(expected[token] - found[token]) for token in expected.keys() & found.keys()), 0.0)
        if ours.token_id != theirs.token_id:
            return max(most, ours.logprob - expected.get(theirs.token_id, float("-inf")))
    return most


device_pinned_policy = evolve(pinned_policy, id="device.pinned-policy/1", tier="device")


@check(
    "device.warm-is-cold/1",
    "device",
    "On CUDA too, a prefix-cache hit changes no token.",
    capability="prefix_cache",
    cause="a warm start raises",
)
def device_warm_is_cold(bench: Bench) -> Measured:
    prompt = bench.tokens(bench.rng("warm"), 37)
    with bench.serve(snapshot_stride=16 if bench.hybrid else None) as served:
        cold, hit = (served.generate([prompt], Sampling(max_new_tokens=8))[0] for _ in range(2))
    expect(
        hit.cached_tokens > 0 and hit.token_ids == cold.token_ids,
        observed=f"{hit.cached_tokens} tokens from the cache, then {list(hit.token_ids)}",
        expected=f"a hit, then {list(cold.token_ids)}",
        cause=WARM_CAUSE,
    )
    return {"cached_tokens": float(hit.cached_tokens)}


CHECKS = (
    device_plan_no_allocation,
    device_plan_pointers_stable,
    device_plan_refuses_what_is_too_large,
    device_attention,
    serves,
    device_deterministic,
    device_writes_only_its_own,
    device_decode_allocates_nothing,
    device_ledger_covers_the_peak,
    graphs_change_nothing,
    short_prompts_replay,
    device_pinned_policy,
    device_warm_is_cold,
)
