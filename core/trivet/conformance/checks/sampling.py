"""Sampling and log-probabilities, as far as a family's vocabulary and logits decide them."""

from __future__ import annotations

import math

import attrs
import torch

from trivet.capacity import Limits
from trivet.conformance.bench import Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.failure import expect
from trivet.conformance.tolerances import bound_of
from trivet.sampling.params import Sampling

DRAWS = 800
FILTERED_DRAWS = 24
NUCLEUS = 0.4
LEAST = 0.5
DEVIATIONS = 5.5
"""Standard deviations: one token in thirty million is off by that much by chance."""


@check(
    "sampling.belongs-to-the-slot/1",
    "protocol",
    "Each request of a batch is sampled as it asked, whichever slots are free and whoever had them before.",
    cause="sampling parameters are bound to another slot than the request's",
)
def belongs_to_the_slot(bench: Bench) -> None:
    rng = bench.rng("slot")
    with bench.serve(limits=Limits(3, 40, 64, 16)) as served:
        served.generate([bench.tokens(rng, 3)], Sampling(max_new_tokens=1))
        wanted = (None, 4, 2, None, 7)
        requests = [
            served.submit(bench.tokens(rng, 4), Sampling(max_new_tokens=5 - i, logprobs=n))
            for i, n in enumerate(wanted)
        ]
        served.finish(requests)
        for request, alternatives in zip(requests, wanted, strict=True):
            reported = request.completion.logprobs
            found = None if reported is None else sorted({len(entry.top) for entry in reported})
            expect(
                found == (None if alternatives is None else [alternatives]) and request.completion.error is None,
                observed=f"a request that asked for {alternatives} alternatives got {found}, of {wanted} in its batch",
                expected="as many as it asked for, with each token",
                cause="sampling parameters are bound to another slot than the request's, or stay bound after it",
            )


@check(
    "sampling.logprobs-are-the-models/1",
    "protocol",
    "Reported log-probabilities are the model's own, normalised and sorted, whatever temperature, penalties and "
    "filters do to the draw; generate and score report the same.",
    cause="log-probabilities are taken after something has changed the logits",
)
def logprobs_are_the_models(bench: Bench) -> Measured:
    tiny = bench.tiny()
    prompt = bench.tokens(bench.rng("logprobs"), 9)
    vocabulary = tiny.vocab_size
    bent = Sampling(
        max_new_tokens=6,
        temperature=3.0,
        top_k=7,
        repetition_penalty=1.7,
        presence_penalty=0.6,
        seed=4,
        logprobs=vocabulary,
    )
    bound = bound_of("logprob-max", bench.device, "float32")
    most = 0.0
    with bench.serve() as served:
        (completion,) = served.generate([prompt], bent)
        tokens = [*prompt, *completion.token_ids]
        scored = served.score(tokens)[len(prompt) - 1 :]
    assert completion.logprobs is not None
    for row, reported in zip(scored, completion.logprobs, strict=True):
        ids = [token for token, _ in reported.top]
        values = torch.tensor([value for _, value in reported.top])
        most = max(most, float((values - row[ids]).abs().max()))
        expect(
            sorted(ids) == list(range(vocabulary))
            and bool((values.diff() <= 0).all())
            and abs(float(values.exp().sum()) - 1) < 1e-4
            and abs(reported.logprob - dict(reported.top)[reported.token_id]) < 1e-5,
            observed=f"{len(set(ids))} alternatives of {vocabulary}, probabilities that sum to "
            f"{float(values.exp().sum()):.5f}, the chosen token's {reported.logprob:.4f}",
            expected="every token once, sorted, summing to 1, the chosen token's value among them",
            cause="log-probabilities are normalised over something else than the whole vocabulary",
        )
    expect(
        most <= bound,
        observed=f"generate and score differ by up to {most:.3g} nat for the same tokens",
        expected=f"at most {bound:.3g}",
        cause="penalties or temperature are applied to the logits that are reported, or decode and prefill differ",
    )
    return {"logprob_max_nats": most}


@check(
    "sampling.draws-follow-the-model/1",
    "protocol",
    "Drawn tokens are as frequent as the model says, equal seeds draw equal tokens whatever is served beside them, "
    "and top_k=1 draws the greedy token.",
    cause="tokens are drawn from another distribution",
)
def draws_follow_the_model(bench: Bench) -> Measured:
    rng = bench.rng("draws")
    prompt = bench.tokens(rng, 6)
    with bench.serve(limits=Limits(20, 120, 32, 16)) as served:
        (greedy,) = served.generate([prompt], Sampling(max_new_tokens=1, logprobs=bench.tiny().vocab_size))
        (narrow,) = served.generate([prompt], Sampling(max_new_tokens=1, temperature=1.5, top_k=1, seed=3))
        drawn = served.generate(
            [prompt] * DRAWS, [Sampling(max_new_tokens=1, temperature=1.0, seed=seed) for seed in range(DRAWS)]
        )
        same = Sampling(max_new_tokens=6, temperature=1.2, seed=99)
        (alone,) = served.generate([prompt], same)
        beside = served.generate([bench.tokens(rng, 5), prompt], same)[1]
    assert greedy.logprobs is not None
    best = greedy.logprobs[0].top[0][0]
    expect(
        greedy.token_ids[0] == best == narrow.token_ids[0],
        observed=f"greedy took {greedy.token_ids[0]}, top_k=1 drew {narrow.token_ids[0]}, the most probable is {best}",
        expected="one token",
        cause="the greedy choice, or the filter by rank, looks at another row or at changed logits",
    )
    expect(
        alone.token_ids == beside.token_ids,
        observed=f"seed 99 drew {list(alone.token_ids)} alone and {list(beside.token_ids)} beside another request",
        expected="equal tokens",
        cause="draws depend on the row or on the batch",
    )
    most = 0.0
    for token, logprob in greedy.logprobs[0].top[:8]:
        expected_draws = DRAWS * math.exp(logprob)
        found = sum(completion.token_ids[0] == token for completion in drawn)
        deviation = math.sqrt(expected_draws * (1 - math.exp(logprob)))
        most = max(most, abs(found - expected_draws) / deviation)
        expect(
            abs(found - expected_draws) <= DEVIATIONS * deviation,
            observed=f"token {token} was drawn {found} times of {DRAWS}",
            expected=f"{expected_draws:.1f} ± {DEVIATIONS * deviation:.1f}, by its log-probability of {logprob:.3f}",
            cause="the draw uses other logits than are reported, or seeds that repeat",
        )
    return {"largest_deviation": most}


@check(
    "sampling.filters/1",
    "protocol",
    "top_k, top_p and min_p draw from the tokens that they leave and from all of them; penalties act on tokens seen.",
    cause="a filter or a penalty raises",
)
def filters(bench: Bench) -> Measured:
    prompt = bench.tokens(bench.rng("filters"), 6)
    vocabulary = bench.tiny().vocab_size
    with bench.serve() as served:
        (greedy,) = served.generate([prompt], Sampling(max_new_tokens=1, logprobs=vocabulary))
        assert greedy.logprobs is not None
        ranked = greedy.logprobs[0].top
        probabilities = [math.exp(logprob) for _, logprob in ranked]
        nucleus = next(n for n in range(1, vocabulary + 1) if sum(probabilities[:n]) >= NUCLEUS)
        likely = sum(probability >= LEAST * probabilities[0] for probability in probabilities)
        # Together in one batch: what ranks tokens for one row must not widen another's choice.
        filtered = {
            "top_k=3": (Sampling(max_new_tokens=1, temperature=1.0, top_k=3), 3),
            "top_k=20": (Sampling(max_new_tokens=1, temperature=1.0, top_k=20), 20),
            f"top_p={NUCLEUS}": (Sampling(max_new_tokens=1, temperature=1.0, top_p=NUCLEUS), nucleus),
            f"min_p={LEAST}": (Sampling(max_new_tokens=1, temperature=1.0, min_p=LEAST), likely),
        }
        asked = [
            (name, attrs.evolve(sampling, seed=seed))
            for seed in range(FILTERED_DRAWS)
            for name, (sampling, _) in filtered.items()
        ]
        answers = served.generate([prompt] * len(asked), [sampling for _, sampling in asked])
        for name, (_, left) in filtered.items():
            drawn = {a.token_ids[0] for (of, _), a in zip(asked, answers, strict=True) if of == name}
            allowed = [token for token, _ in ranked[:left]]
            expect(
                drawn <= set(allowed) and (len(drawn) > 1 or left == 1),
                observed=f"{name} drew {sorted(drawn)} in {FILTERED_DRAWS} draws",
                expected=f"some of {allowed}",
                cause=f"{name.partition('=')[0]} keeps a token too many or too few, or works on another row's "
                "probabilities",
            )
        shy = Sampling(max_new_tokens=12, presence_penalty=100.0)
        (varied,) = served.generate([prompt], shy)
        (again,) = served.generate([prompt], shy)
        expect(
            again.token_ids == varied.token_ids,
            observed=f"a penalised request, asked again in the same slot: {list(again.token_ids)}",
            expected=f"{list(varied.token_ids)}",
            cause="the counts of penalties outlive their request, and weigh on the slot's next one",
        )
        expect(
            len(set(varied.token_ids)) == len(varied.token_ids),
            observed=f"with presence_penalty=100 the answer is {list(varied.token_ids)}",
            expected="no token twice",
            cause="tokens of the answer are not counted, or counted for another slot",
        )
    return {"nucleus_tokens": float(nucleus), "min_p_tokens": float(likely)}


CHECKS = (belongs_to_the_slot, logprobs_are_the_models, draws_follow_the_model, filters)
