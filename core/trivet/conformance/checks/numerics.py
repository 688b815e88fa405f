"""Numbers against the oracle: however the tokens are divided over steps, rows, pages and caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch

from trivet.capacity import Limits
from trivet.conformance.batches import NEAR, Contexts, batch_of, drawn_batch, drawn_capacities
from trivet.conformance.bench import Bench, differing
from trivet.conformance.check import Measured, check
from trivet.conformance.checks.layout import bound_owner
from trivet.conformance.diagnosis import diagnose
from trivet.conformance.failure import broken, expect
from trivet.conformance.oracle import OracleSequence
from trivet.conformance.served import Served
from trivet.conformance.tiny import TinyModel
from trivet.conformance.tolerances import bound_of, tolerances
from trivet.runtime.results import Completion
from trivet.sampling.params import Sampling

WHOLE = Limits(max_requests=4, max_step_tokens=96, max_context=96, page_size=16)
"""A whole sequence in one step."""
LONG_TOKENS = 600
"""A step beyond any block of rows that layers and kernels are cut into; fewer where a tiny model's context ends."""
SHORT_TOKENS = 64
"""Up to here, a step of every size, of the first tiny model."""
DRAWN_LENGTHS = 5
COLD_CAUSE = (
    "not the prefix cache, which gave nothing: the steps that the prompt is cut into (numerics.chunked) or decoding "
    "(numerics.decode); if those hold, publishing a page or saving a snapshot changes what the request itself reads"
)
WARM_CAUSE = (
    "positions restart on a warm hit, the hit's pages are not those that were matched, or the recurrent state at the "
    "boundary is not the one that was saved"
)


def _cases(bench: Bench) -> Iterator[tuple[TinyModel, Sequence[OracleSequence]]]:
    for tiny in bench.tinies:
        yield tiny, bench.oracle.sequences(tiny)


def _bound(bench: Bench, tiny: TinyModel) -> float:
    """How far float32 log-probabilities may be from the oracle's."""
    return bound_of("logprob-max", bench.device, "float32", f"{bench.family.name}/{tiny.name}")


def _apart(said: torch.Tensor, sequence: OracleSequence) -> float:
    """Largest difference from the oracle in nats, infinite where something is not a number."""
    return float((said - sequence.logprobs[: len(said)]).abs().nan_to_num(torch.inf).max())


def _cause(bench: Bench, tiny: TinyModel, sequence: OracleSequence, special: str) -> str:
    """`special` if the sequence is right as a whole prompt in one step: else nothing is known of what is special."""
    with bench.serve(tiny, limits=WHOLE) as served:
        try:
            apart = _apart(served.score(sequence.tokens), sequence)
        except Exception as error:
            return f"the same as numerics.prefill, mend that first: a whole prompt raises {type(error).__name__}"
    if apart <= _bound(bench, tiny):
        return special
    return (
        "the same as numerics.prefill, mend that first: as a whole prompt in one step the sequence is off by "
        f"{apart:.3g} nat already"
    )


def _require_scores(
    bench: Bench, served: Served, tiny: TinyModel, sequence: OracleSequence, how: str, cause: str
) -> float:
    """Hold the scores of a sequence against the oracle; returns how far apart they are."""
    bound = _bound(bench, tiny)
    said = served.score(sequence.tokens)
    apart = _apart(said, sequence)
    if apart > bound:
        worst = int((said - sequence.logprobs[:-1]).abs().nan_to_num(torch.inf).amax(-1).argmax())
        broken(
            observed=f"config {tiny.name!r}, {len(sequence.tokens)} tokens {how}: log-probabilities are off by up to "
            f"{apart:.3g} nat, most at position {worst}",
            expected=f"at most {bound:.3g} nat from {bench.oracle.source}",
            cause=_cause(bench, tiny, sequence, cause),
        )
    return apart


def _require_answer(
    bench: Bench, completion: Completion, tiny: TinyModel, sequence: OracleSequence, how: str, cause: str
) -> float:
    """Hold a greedy answer and its log-probabilities against the oracle's continuation."""
    bound = _bound(bench, tiny)
    wanted = sequence.tokens[sequence.prompt_tokens :]
    place = differing(completion.token_ids, wanted)
    apart = 0.0
    for index, reported in enumerate((completion.logprobs or ())[: place + 1]):
        row = sequence.logprobs[sequence.prompt_tokens - 1 + index]
        apart = max([apart, *(abs(value - float(row[token])) for token, value in reported.top)])
    if completion.token_ids != wanted or apart > bound:
        tokens = "all tokens agree" if place == len(wanted) else f"tokens differ from new token {place} on"
        broken(
            observed=f"config {tiny.name!r}, {sequence.prompt_tokens} prompt tokens and {len(wanted)} new ones {how}: "
            f"{tokens}, log-probabilities up to there differ by {apart:.3g} nat",
            expected=f"the tokens of {bench.oracle.source}, within {bound:.3g} nat",
            cause=_cause(bench, tiny, sequence, cause),
        )
    return apart


def _asking(sequence: OracleSequence, tiny: TinyModel) -> Sampling:
    return Sampling(max_new_tokens=len(sequence.tokens) - sequence.prompt_tokens, logprobs=tiny.vocab_size)


def _prompt(sequence: OracleSequence) -> tuple[int, ...]:
    return sequence.tokens[: sequence.prompt_tokens]


@check(
    "numerics.tolerances/1",
    "numerics",
    "Every bound is a stated multiple of a measured floor, kept with its samples, device and dtype; one that was "
    "loosened without a new measurement fails.",
    cause="the ledger of tolerances cannot be read",
)
def tolerance_ledger(bench: Bench) -> Measured:
    entries = tolerances()
    faults = [fault for entry in entries for fault in entry.faults()]
    expect(
        not faults,
        observed="; ".join(faults),
        expected="entries as they were measured",
        cause="a bound was changed by hand: measure again with the entry's command",
    )
    return {f"{e.quantity} {e.device} {e.dtype}": e.bound for e in entries if e.model == "*"}


@check(
    "numerics.prefill/1",
    "numerics",
    "A prompt computed in one step has the oracle's log-probabilities at every position.",
    cause="the model raises on a prompt of 82 tokens",
)
def prefill(bench: Bench) -> Measured:
    most = 0.0
    for tiny, sequences in _cases(bench):
        bound = _bound(bench, tiny)
        for sequence in sequences:
            with bench.serve(tiny, limits=WHOLE) as served:
                said = served.score(sequence.tokens)
            apart = _apart(said, sequence)
            most = max(most, apart)
            if apart > bound:
                broken(
                    observed=f"config {tiny.name!r}, {len(sequence.tokens)} tokens in one step: log-probabilities are "
                    f"off by up to {apart:.3g} nat",
                    expected=f"at most {bound:.3g} nat from {bench.oracle.source}",
                    cause=diagnose(bench, tiny, sequence, said, bound),
                )
    return {"logprob_max_nats": most}


@check(
    "numerics.decode/1",
    "numerics",
    "Decoding token by token gives the oracle's tokens, with its log-probabilities.",
    cause="a decode step raises",
)
def decode(bench: Bench) -> Measured:
    most = 0.0
    for tiny, sequences in _cases(bench):
        for sequence in sequences:
            with bench.serve(tiny, limits=WHOLE, prefix_cache=False) as served:
                (answer,) = served.generate([_prompt(sequence)], _asking(sequence, tiny))
                cause = (
                    "decode computes otherwise than prefill: the position or the page of the new token, the state or "
                    "convolution tail that prefill left, or the recurrent form of a layer"
                )
                most = max(most, _require_answer(bench, answer, tiny, sequence, "one by one", cause))
    return {"logprob_max_nats": most}


@check(
    "numerics.chunked/1",
    "numerics",
    "A prompt cut into steps of any size has the oracle's log-probabilities at every position.",
    capability="chunked_prefill",
    cause="a step that begins inside a prompt raises",
)
def chunked(bench: Bench) -> Measured:
    most = 0.0
    for tiny, sequences in _cases(bench):
        for step_tokens in (1, 3, 32):
            with bench.serve(tiny, limits=Limits(2, step_tokens, 96, 4)) as served:
                for sequence in sequences if step_tokens == 32 else sequences[-1:]:
                    cause = (
                        "a chunk does not go on where the one before ended: its positions, its mask over the earlier "
                        "context, the carried recurrent state or convolution tail"
                    )
                    how = f"in steps of {step_tokens}"
                    most = max(most, _require_scores(bench, served, tiny, sequence, how, cause))
    return {"logprob_max_nats": most}


@check(
    "numerics.mixed/1",
    "numerics",
    "Steps that hold decode rows and prefill rows together change no row.",
    capability="mixed_steps",
    cause="a mixed step raises",
)
def mixed(bench: Bench) -> Measured:
    most, steps = 0.0, 0
    for tiny, sequences in _cases(bench):
        short, long = min(sequences, key=_length), max(sequences, key=_length)
        with bench.serve(tiny, limits=Limits(3, 16, 96, 4), prefix_cache=False) as served:
            requests = [served.submit(_prompt(short), _asking(short, tiny))]
            served.step()
            requests.append(served.submit(_prompt(long), _asking(long, tiny)))
            paths = [report.path for report in served.finish(requests)]
            expect(
                "mixed" in paths or not bench.family.capabilities.chunked_prefill,
                observed=f"steps were {paths}",
                expected="a mixed one: a request decodes while another's prompt is computed",
                cause="the scheduler keeps decode and prefill apart though the family supports mixed steps",
            )
            steps += paths.count("mixed")
            for request, sequence in zip(requests, (short, long), strict=True):
                cause = (
                    "rows of a mixed step are told apart by length instead of by kind, or a row reads another's "
                    "tokens, positions or state"
                )
                answer = request.completion
                most = max(most, _require_answer(bench, answer, tiny, sequence, "in mixed steps", cause))
    return {"logprob_max_nats": most, "mixed_steps": float(steps)}


def _length(sequence: OracleSequence) -> int:
    return len(sequence.tokens)


@check(
    "numerics.batched/1",
    "numerics",
    "Requests served at once, of different lengths, each get the oracle's answer.",
    cause="a batch raises",
)
def batched(bench: Bench) -> Measured:
    most = 0.0
    rng = bench.rng("batched")
    for tiny, sequences in _cases(bench):
        order = [sequences[int(index)] for index in rng.integers(0, len(sequences), 5)]
        with bench.serve(tiny, limits=Limits(4, 96, 96, 4), prefix_cache=False) as served:
            answers = served.generate([_prompt(s) for s in order], [_asking(s, tiny) for s in order])
            for answer, sequence in zip(answers, order, strict=True):
                cause = "rows of a batch read each other's pages, positions, states or sampling slots"
                most = max(most, _require_answer(bench, answer, tiny, sequence, "in a batch of five", cause))
    return {"logprob_max_nats": most}


@check(
    "numerics.warm/1",
    "numerics",
    "A prompt that starts from the prefix cache gets the oracle's answer, as the cold one did.",
    capability="prefix_cache",
    cause="a warm start raises",
)
def warm(bench: Bench) -> Measured:
    most = 0.0
    for tiny, sequences in _cases(bench):
        with bench.serve(tiny) as served:
            grain = served.stats["prefix_grain_tokens"]
            for turn in ("cold", "warm", "warm once more"):
                for sequence in sequences:
                    (answer,) = served.generate([_prompt(sequence)], _asking(sequence, tiny))
                    expected = 0 if turn == "cold" else (sequence.prompt_tokens - 1) // grain * grain
                    expect(
                        answer.cached_tokens == expected,
                        observed=f"{turn}: {answer.cached_tokens} tokens of {sequence.prompt_tokens} from the cache",
                        expected=f"{expected}",
                        cause="pages are not published, or not found",
                    )
                    cause = COLD_CAUSE if turn == "cold" else WARM_CAUSE
                    most = max(most, _require_answer(bench, answer, tiny, sequence, turn, cause))
    return {"logprob_max_nats": most}


@check(
    "numerics.page-sizes/1",
    "numerics",
    "The page size changes no result.",
    cause="a page size is not served",
)
def page_sizes(bench: Bench) -> Measured:
    most = 0.0
    for tiny, sequences in _cases(bench):
        for page_size in (1, 3, 64):
            with bench.serve(tiny, limits=Limits(2, 40, 96, page_size)) as served:
                cause = "the page or the offset of a token is computed from another page size than the cache has"
                how = f"on pages of {page_size}"
                most = max(most, _require_scores(bench, served, tiny, sequences[-1], how, cause))
    return {"logprob_max_nats": most}


@check(
    "numerics.bfloat16/1",
    "numerics",
    "Served in bfloat16, log-probabilities stay as near to the float32 oracle as the dtype allows.",
    cause="the model does not run in bfloat16",
)
def bfloat16(bench: Bench) -> Measured:
    most = 0.0
    for tiny, sequences in _cases(bench):
        bound = bound_of("logprob-mean", bench.device, "bfloat16", f"{bench.family.name}/{tiny.name}")
        with bench.serve(tiny, dtype="bfloat16", limits=WHOLE) as served:
            for sequence in sequences:
                said = served.score(sequence.tokens)
                apart = float((said - sequence.logprobs[:-1]).abs().nan_to_num(torch.inf).mean())
                most = max(most, apart)
                if not apart <= bound:
                    cause = (
                        "something that needs float32 is computed in the served dtype: a mean square, an angle, a "
                        "softmax, a decay or a recurrent state"
                    )
                    broken(
                        observed=f"config {tiny.name!r}: in bfloat16 off by {apart:.3g} nat on average",
                        expected=f"at most {bound:.3g} nat",
                        cause=_cause(bench, tiny, sequence, cause),
                    )
    return {"logprob_mean_nats": most}


@check(
    "numerics.attention/1",
    "numerics",
    "A decode path's attention equals causal attention in float64, for any mix of rows, also where a context or a step "
    "spans several of its tiles, and reads nothing that no row owns.",
    cause="attend or append raises on a batch within the capacity",
)
def attention(bench: Bench) -> Measured:
    rng = bench.rng("attention")
    generator = torch.Generator().manual_seed(bench.seed)
    # Nothing was measured of what kernel libraries compute in half precision: a bound on errors by the result's size.
    relative = bench.dtype != "float32"
    bound = NEAR[bench.dtype] if relative else bound_of("attention-max", bench.device, "float32")
    most = 0.0
    geometries = dict.fromkeys(a for tiny in bench.tinies for a in tiny.geometry.attention_geometries)
    for geometry in geometries:
        for path in bench.usable_paths(geometry):
            for capacity in drawn_capacities(rng, bench, path, geometry):
                owner = bound_owner(bench, path, capacity)
                for turn in range(5):
                    batch = drawn_batch(rng, capacity)
                    if turn % 2 and batch.rows <= capacity.tokens:
                        ones = [1] * batch.rows
                        batch = batch_of(capacity, ones, batch.kv_lengths.tolist(), decode_rows=batch.rows)
                    step = "a decode step" if batch.decode_rows == batch.rows else "a step"
                    contexts = Contexts.drawn(capacity, batch, generator, bench.device)
                    query = contexts.query(capacity, batch, generator)
                    owner.update(batch)
                    owner.append(*contexts.new(batch), contexts.cache_keys, contexts.cache_values)
                    found = owner.attend(query, contexts.cache_keys, contexts.cache_values)
                    wanted = contexts.attended(batch, query)
                    error = (found.cpu().double() - wanted).abs().nan_to_num(torch.inf)
                    apart = float((error / (1 + wanted.abs()) if relative else error).max())
                    most = max(most, apart)
                    expect(
                        apart <= bound,
                        observed=f"path {path.name!r}, {geometry.label}, {step} of query lengths "
                        f"{batch.query_lengths.tolist()}, {batch.decode_rows} decode rows, contexts "
                        f"{batch.kv_lengths.tolist()}, pages of {capacity.limits.page_size}: off by {apart:.3g}",
                        expected=f"at most {bound:.3g} from attention in float64",
                        cause="the scale, the causal mask, the grouping of query heads, the page of a key, or the "
                        "merging of tiles is wrong; infinite means that NaN of a free page or a page tail was read",
                    )
                owner.close()
    return {"attention_max": most}


@check(
    "numerics.step-sizes/1",
    "numerics",
    "What a step gives a token does not depend on how many tokens the step has: sequences of every length up to 64 and "
    "of drawn longer ones, and one cut into steps of a drawn size, agree with a long one that begins like them.",
    cause="the model raises in a step of some size",
)
def step_sizes(bench: Bench) -> Measured:
    rng = bench.rng("step sizes")
    most, tried = 0.0, 0
    for tiny in bench.tinies:
        longest = min(tiny.geometry.max_positions, LONG_TOKENS)
        tokens = bench.tokens(rng, longest, tiny)
        lengths = rng.integers(2, longest, DRAWN_LENGTHS).tolist()
        if tiny is bench.tiny():
            lengths += range(2, min(SHORT_TOKENS, longest) + 1)
        bound = _bound(bench, tiny)
        limits = Limits(1, longest, longest, 16)
        with bench.serve(tiny, limits=limits, prefix_cache=False) as served:
            whole = _next_logprobs(served, tokens)
            apart = [(f"in a step of {n}", whole, _next_logprobs(served, tokens[:n])) for n in lengths]
        if bench.family.capabilities.chunked_prefill:
            step_tokens = int(rng.integers(8, 96))
            with bench.serve(
                tiny, limits=attrs.evolve(limits, max_step_tokens=step_tokens), prefix_cache=False
            ) as served:
                apart.append((f"in steps of {step_tokens}", whole, _next_logprobs(served, tokens)))
        for how, wanted, said in apart:
            differences = (said - wanted[: len(said)]).abs().nan_to_num(torch.inf)
            most = max(most, float(differences.max()))
            tried += 1
            expect(
                float(differences.max()) <= bound,
                observed=f"config {tiny.name!r}, {len(said) + 1} tokens {how}: log-probabilities differ by up to "
                f"{float(differences.max()):.3g} nat, most at position {int(differences.argmax())}, from those of one "
                f"step of {longest} tokens that begins with them",
                expected=f"at most {bound:.3g} nat",
                cause="a layer does otherwise in steps of some sizes: a branch asks how many tokens there are, a table "
                "or a buffer is made for shorter steps, or a kernel's last block is left out",
            )
    return {"logprob_max_nats": most, "sizes": float(tried)}


def _next_logprobs(served: Served, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probability of each token of a sequence but the first, float32."""
    served.allow(40 + 4 * len(tokens))
    return torch.tensor([score.logprob for score in served.runtime.score(list(tokens))])


EARLY_CHECKS = (tolerance_ledger, attention)
"""Narrow, and before all that builds on attention."""
CHECKS = (
    prefill,
    decode,
    chunked,
    mixed,
    batched,
    warm,
    page_sizes,
    bfloat16,
    step_sizes,
)
