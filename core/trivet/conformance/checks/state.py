"""Recurrent layers: a slot's state is its request's alone, from its first token on."""

from __future__ import annotations

import torch

from trivet.capacity import Limits
from trivet.conformance.bench import Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.checks.prefix import LOGGED, WARM_CAUSE, require_equal
from trivet.conformance.failure import expect
from trivet.conformance.served import Served
from trivet.sampling.params import Sampling

DECODE_CAUSE = (
    "the form of a layer that decode takes, one token a row, computes otherwise than the one over chunks: which key "
    "head a value head reads, the decay, beta and their activations, the order of the convolution's taps"
)


@check(
    "state.starts-clear/1",
    "protocol",
    "A request starts from zero recurrent and convolution state, whoever had the slot before.",
    recurrent=True,
    cause="a slot is not cleared before its first token",
)
def starts_clear(bench: Bench) -> None:
    rng = bench.rng("clear")
    prompts = [bench.tokens(rng, n) for n in (1, 3, 26, 9)]
    sampling = Sampling(max_new_tokens=6, logprobs=6)
    with bench.serve(prefix_cache=False, limits=Limits(1, 24, 96, 4)) as served:
        fresh = []
        for prompt in prompts:
            _fill_slots(served, 0.0)
            fresh.append(served.generate([prompt], sampling)[0])
    with bench.serve(prefix_cache=False, limits=Limits(1, 24, 96, 4)) as served:
        for prompt, expected in zip(prompts, fresh, strict=True):
            _fill_slots(served, 7.0)
            (found,) = served.generate([prompt], sampling)
            expect(
                (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs),
                observed=f"a prompt of {len(prompt)} tokens in a slot that holds 7s says {list(found.token_ids)}",
                expected=f"{list(expected.token_ids)}, as from zeros, bit for bit",
                cause="the slot is not cleared before the request's first step, or the wrong one is: the state of the "
                "request before it is carried on",
            )


@check(
    "state.kept-in-float32/1",
    "protocol",
    "Recurrent states are float32 whatever the model is served in, in slots and in snapshots; convolution tails are in "
    "the served dtype. A state in less forgets.",
    recurrent=True,
    cause="the states' layout takes another dtype",
)
def kept_in_float32(bench: Bench) -> None:
    with bench.serve(dtype="bfloat16") as served:
        state = served.engine.state
        assert state is not None
        found = {
            (spec.name.partition(".")[0], str(held[spec.name].dtype).removeprefix("torch."))
            for held in (state.slots, state.snapshots)
            for spec in held.layout.specs
        }
    expected = {("recurrent", "float32"), ("tail", "bfloat16")}
    expect(
        found == expected,
        observed=f"served in bfloat16, the states are {sorted(found)}",
        expected=f"{sorted(expected)}",
        cause="recurrent states are laid out in the served dtype, and lose what they carry to rounding",
    )


def _fill_slots(served: Served, value: float) -> None:
    state = served.engine.state
    assert state is not None
    for spec in state.slots.layout.specs:
        state.slots[spec.name].fill_(value)


@check(
    "state.carried-between-steps/1",
    "protocol",
    "A row's recurrent and convolution state after its tokens is the same however they were divided over steps, and "
    "every layer has one of its own.",
    recurrent=True,
    capability="chunked_prefill",
    cause="state is lost, or taken twice, where a prompt is cut",
)
def carried_between_steps(bench: Bench) -> Measured:
    rng = bench.rng("carried")
    most = 0.0
    for tiny in bench.tinies:
        prompt = bench.tokens(rng, 21, tiny)
        states = {}
        for step_tokens in (64, 9, 1):
            with bench.serve(tiny, prefix_cache=False, limits=Limits(1, step_tokens, 64, 4)) as served:
                request = served.submit(prompt, Sampling(max_new_tokens=2))
                while request._scheduled.computed_tokens < len(prompt):
                    served.step()
                states[step_tokens] = _states(served, request._scheduled.slot)
        for step_tokens, found in states.items():
            for name, state in found.items():
                apart = float((state - states[64][name]).abs().max()) if state.numel() else 0.0
                scale = float(states[64][name].abs().max()) if state.numel() else 1.0
                expect(
                    scale > 0 and apart <= 1e-4 * scale,
                    observed=f"config {tiny.name!r}: {name} after 21 tokens in steps of {step_tokens} differs by "
                    f"{apart:.3g} from that after one step; its largest entry is {scale:.3g}",
                    expected="equal states but for rounding, not zero",
                    cause=DECODE_CAUSE
                    if step_tokens == 1
                    else "the state after a step is not written back to its slot, the convolution's tail is not "
                    "carried over, or two layers share one state",
                )
                most = max(most, apart / scale)
            firsts = [state.flatten()[:8] for name, state in found.items() if name.startswith("recurrent")]
            expect(
                len({tuple(first.tolist()) for first in firsts}) == len(firsts),
                observed=f"config {tiny.name!r}: two layers hold the same recurrent state",
                expected="a state of its own for each layer",
                cause="the layers' states alias one buffer",
            )
    return {"relative_difference": most}


def _states(served: Served, slot: int) -> dict[str, torch.Tensor]:
    state = served.engine.state
    assert state is not None
    layers = served.engine.blueprint.geometry.recurrent_layers
    return {
        name: tensor[slot].float().cpu().clone()
        for layer in layers
        for name, tensor in ((f"recurrent {layer}", state.recurrent(layer)), (f"tail {layer}", state.tail(layer)))
    }


@check(
    "state.rows-do-not-mix/1",
    "protocol",
    "A step over rows of different lengths, rows of one token among them, leaves in each slot the state that its row "
    "leaves when it is alone.",
    recurrent=True,
    cause="a step over rows of different lengths raises",
)
def rows_do_not_mix(bench: Bench) -> Measured:
    rng = bench.rng("rows")
    most = 0.0
    for tiny in bench.tinies:
        prompts = [bench.tokens(rng, n, tiny) for n in (5, 1, 34, 1, 12, 3)]
        limits = Limits(len(prompts), 96, 64, 4)
        states = []
        for groups in ([prompts], [[prompt] for prompt in prompts]):
            found = []
            with bench.serve(tiny, prefix_cache=False, limits=limits) as served:
                for group in groups:
                    requests = [served.submit(prompt, Sampling(max_new_tokens=2)) for prompt in group]
                    served.step()
                    found += [_states(served, request._scheduled.slot) for request in requests]
                    served.finish(requests)
            states.append(found)
        for prompt, together, alone in zip(prompts, *states, strict=True):
            for name, state in together.items():
                apart = float((state - alone[name]).abs().max()) if state.numel() else 0.0
                scale = max(float(alone[name].abs().max()) if state.numel() else 1.0, 1e-6)
                most = max(most, apart / scale)
                expect(
                    apart <= 1e-4 * scale,
                    observed=f"config {tiny.name!r}: {name} of a row of {len(prompt)} tokens differs by {apart:.3g} "
                    f"where rows of {[len(p) for p in prompts]} tokens share the step; its largest entry is "
                    f"{scale:.3g}",
                    expected="the state of the row alone, but for rounding",
                    cause="tokens of a mixed step are given to the wrong row (a row of one token beside longer ones), "
                    "padding decays or writes a state, or a row starts from another's state or tail",
                )
    return {"relative_difference": most}


@check(
    "state.snapshots-are-isolated/1",
    "protocol",
    "A snapshot is a copy: requests that start from it change neither it nor each other, and what they say is what "
    "they say cold.",
    recurrent=True,
    capability="prefix_cache",
    cause="a snapshot and a slot share memory",
)
def snapshots_are_isolated(bench: Bench) -> Measured:
    rng = bench.rng("snapshots")
    kept = 0
    for tiny in bench.tinies:
        shared = bench.tokens(rng, 21, tiny)
        prompts = [[*shared, *bench.tokens(rng, n, tiny)] for n in (1, 6, 3)]
        with bench.serve(tiny, prefix_cache=False) as served:
            cold = [served.generate([prompt], LOGGED)[0] for prompt in prompts]
        with bench.serve(tiny) as served:
            served.generate([shared], Sampling(max_new_tokens=1))
            state = served.engine.state
            assert state is not None
            attached = _attached(served)
            expect(
                bool(attached),
                observed="no snapshot is kept after a prompt of 21 tokens",
                expected="one at its last boundary",
                cause="prefill does not stop at the boundary, or the snapshot is not attached",
            )
            before = _snapshots(served, attached)
            expect(
                any(bool(tensor.abs().max() > 0) for tensor in before.values() if tensor.numel()),
                observed="the snapshots that are kept hold zeros",
                expected="the state at the boundary",
                cause="the state is saved from another slot, or before the step has written it",
            )
            together = served.generate(prompts, LOGGED)
            for found, expected in zip(together, cold, strict=True):
                what = f"config {tiny.name!r}: one of three requests from one snapshot"
                require_equal(found, expected, what, WARM_CAUSE, bench)
            still = [snapshot for snapshot in attached if snapshot in _attached(served)]
            changed = [
                name for name, tensor in _snapshots(served, still).items() if not torch.equal(tensor, before[name])
            ]
            expect(
                not changed,
                observed=f"config {tiny.name!r}: restoring has changed {changed[:4]}",
                expected="snapshots as they were saved, bit for bit",
                cause="a slot is a view of the snapshot, or a save goes to a snapshot that is in use",
            )
            kept += len(still)
    return {"snapshots": float(kept)}


def _attached(served: Served) -> list[int]:
    """Ids of the snapshots that a hit can find."""
    prefix = served.engine.scheduler._holdings.prefix
    assert prefix is not None
    return sorted(node.snapshot for node in prefix._nodes.values() if node.snapshot is not None)


def _snapshots(served: Served, ids: list[int]) -> dict[str, torch.Tensor]:
    state = served.engine.state
    assert state is not None
    held = {}
    for spec in state.snapshots.layout.specs:
        flat = state.snapshots[spec.name]
        entries = flat.view(served.engine.blueprint.snapshot_count, -1)
        held.update({f"snapshot {id_} {spec.name}": entries[id_].clone() for id_ in ids})
    return held


CHECKS = (
    starts_clear,
    kept_in_float32,
    carried_between_steps,
    rows_do_not_mix,
    snapshots_are_isolated,
)
