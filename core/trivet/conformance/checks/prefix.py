"""The prefix cache: a hit of the promised length changes no token, and what looks alike is not taken for a hit."""

from __future__ import annotations

from trivet.capacity import Limits
from trivet.conformance.bench import LIMITS, Bench, differing
from trivet.conformance.check import Measured, check
from trivet.conformance.failure import broken, expect
from trivet.conformance.served import Served
from trivet.conformance.tolerances import bound_of
from trivet.runtime.results import Completion
from trivet.sampling.params import Sampling

LOGGED = Sampling(max_new_tokens=6, logprobs=8)


def farthest_apart(first: Completion, second: Completion) -> float:
    """Largest difference between two answers' log-probabilities, in nats, as far as their tokens agree."""
    if first.logprobs is None or second.logprobs is None:
        broken(
            observed="an answer without log-probabilities",
            expected="the ones that its request asked for",
            cause="the request is sampled with another request's parameters: they are bound to another slot",
        )
    most = 0.0
    common = differing(first.token_ids, second.token_ids)
    for one, other in zip(first.logprobs[:common], second.logprobs[:common], strict=False):
        theirs = dict(other.top)
        most = max([most, *(abs(value - theirs[token]) for token, value in one.top if token in theirs)])
    return most


def require_equal(warm: Completion, cold: Completion, what: str, cause: str, bench: Bench) -> float:
    """`Broken` unless two answers agree but for rounding; returns how far apart they are."""
    bound = bound_of("logprob-max", bench.device, "float32")
    apart = farthest_apart(warm, cold)
    place = differing(warm.token_ids, cold.token_ids)
    expect(
        warm.token_ids == cold.token_ids and apart <= bound,
        observed=f"{what}: {warm.cached_tokens} of {warm.prompt_tokens} prompt tokens from the cache, tokens differ "
        f"from new token {place}, log-probabilities by up to {apart:.3g} nat",
        expected=f"the tokens of a cold run, and log-probabilities within {bound:.3g} nat",
        cause=cause,
    )
    return apart


MATCH_CAUSE = (
    "a full page is not published, a snapshot is not saved at the boundary, or matching stops early or takes the last "
    "token too, so that nothing is left to compute"
)
WARM_CAUSE = (
    "positions restart on a warm hit, the page list of the hit is not the one that was matched, or the recurrent state "
    "or convolution tail at the boundary is not the one that was left there"
)


@check(
    "prefix.hit-length/1",
    "protocol",
    "An immediate rerun of an n-token prompt takes ((n - 1) // grain) * grain tokens from the cache, whatever "
    "max_step_tokens is, and the counter grows by as much; the next turn of a chat hits its answer too.",
    capability="prefix_cache",
    cause="pages or snapshots are not published where they should be, or not found",
)
def hit_length(bench: Bench) -> Measured:
    rng = bench.rng("hits")
    tried = 0
    for step_tokens in (1, 5, 64):
        for page_size in (1, 4):
            with bench.serve(limits=Limits(2, step_tokens, 64, page_size)) as served:
                grain = served.stats["prefix_grain_tokens"]
                for length in (1, grain, grain + 1, 19):
                    prompt = bench.tokens(rng, length)
                    served.generate([prompt], Sampling(max_new_tokens=1), MATCH_CAUSE)
                    before = served.stats["prefix_hit_tokens"]
                    (warm,) = served.generate([prompt], Sampling(max_new_tokens=1), MATCH_CAUSE)
                    grown = served.stats["prefix_hit_tokens"] - before
                    wanted = (length - 1) // grain * grain
                    tried += 1
                    expect(
                        warm.cached_tokens == wanted and grown == wanted,
                        observed=f"a rerun of {length} tokens, pages of {page_size}, steps of {step_tokens}: "
                        f"{warm.cached_tokens} tokens from the cache, the counter grew by {grown}",
                        expected=f"{wanted}, the whole grains of {grain} tokens before the last token",
                        cause=MATCH_CAUSE,
                    )
    with bench.serve() as served:
        grain = served.stats["prefix_grain_tokens"]
        prompt = bench.tokens(rng, 10)
        (answer,) = served.generate([prompt], Sampling(max_new_tokens=12))
        (turn,) = served.generate([[*prompt, *answer.token_ids, *bench.tokens(rng, 3)]], Sampling(max_new_tokens=1))
        computed = len(prompt) + len(answer.token_ids) - 1
        expect(
            turn.cached_tokens == computed // grain * grain,
            observed=f"the next turn after {computed} computed tokens takes {turn.cached_tokens} from the cache",
            expected=f"{computed // grain * grain}: the answer's pages stay findable",
            cause="pages that decoding fills are not published, or their snapshot is not kept",
        )
    return {"reruns": float(tried)}


@check(
    "prefix.warm-is-cold/1",
    "protocol",
    "A prefix-cache hit changes no token: prompts that begin like earlier ones, end inside them or go on from them get "
    "what they get without a cache.",
    capability="prefix_cache",
    cause="what a hit starts from is not what was left there",
)
def warm_is_cold(bench: Bench) -> Measured:
    rng = bench.rng("warm")
    most = 0.0
    for tiny in bench.tinies:
        shared = bench.tokens(rng, 22, tiny)
        longer = [[*shared, *bench.tokens(rng, 5, tiny)], [*shared[:13], *bench.tokens(rng, 9, tiny)]]
        prompts = [shared, shared[:9], *longer, longer[0], shared]
        with bench.serve(tiny, prefix_cache=False) as served:
            cold = [served.generate([prompt], LOGGED)[0] for prompt in prompts]
        with bench.serve(tiny) as served:
            hits = 0
            for prompt, expected in zip(prompts, cold, strict=True):
                (warm,) = served.generate([prompt], LOGGED)
                hits += warm.cached_tokens
                most = max(most, require_equal(warm, expected, f"config {tiny.name!r}", WARM_CAUSE, bench))
            expect(
                hits > 0,
                observed="none of the prompts hit the cache",
                expected="hits: they share their first tokens",
                cause="the cache finds nothing",
            )
            together = served.generate(prompts, LOGGED)
            for warm, expected in zip(together, cold, strict=True):
                what = f"config {tiny.name!r}, all prompts at once"
                most = max(most, require_equal(warm, expected, what, WARM_CAUSE, bench))
            served.require_idle("warm requests")
    return {"logprob_max_nats": most}


@check(
    "prefix.no-false-hit/1",
    "protocol",
    "A page is found again by all tokens up to its end: the same tokens behind another beginning, or at another place, "
    "are no hit, and both are kept.",
    capability="prefix_cache",
    cause="a page's digest leaves out what came before it",
)
def no_false_hit(bench: Bench) -> None:
    rng = bench.rng("false")
    first, second, body = (bench.tokens(rng, 4 * LIMITS.page_size) for _ in range(3))
    second[0] = (first[0] + 1) % bench.tiny().vocab_size
    prompts = [[*first, *body, 1], [*second, *body, 1], [*body, *first, 1], [*first[4:], *body, 1]]
    with bench.serve(prefix_cache=False) as served:
        cold = [served.generate([prompt], LOGGED)[0] for prompt in prompts]
    with bench.serve() as served:
        for prompt, expected in zip(prompts, cold, strict=True):
            (found,) = served.generate([prompt], LOGGED)
            expect(
                found.cached_tokens == 0,
                observed=f"a prompt that shares pages' content with an earlier one, but no prefix, takes "
                f"{found.cached_tokens} tokens from the cache",
                expected="0",
                cause="pages are matched by their own tokens alone, without those before them",
            )
            what = "a prompt that shares content, but no prefix"
            require_equal(found, expected, what, "a page was matched wrongly", bench)
        for prompt in prompts:
            (again,) = served.generate([prompt], LOGGED)
            expect(
                again.cached_tokens == len(prompt) - 1,
                observed=f"asked again, it takes {again.cached_tokens} tokens of {len(prompt)} from the cache",
                expected=f"{len(prompt) - 1}: pages of equal tokens behind different beginnings are kept beside each "
                "other",
                cause="a page's digest covers its own tokens alone, without those before them, so that such pages take "
                "each other's place",
            )


@check(
    "prefix.lists-outgrow-the-pool/1",
    "protocol",
    "Requests that share a prefix are served together even when their page lists together are longer than the pool.",
    capability="prefix_cache",
    cause="page lists are bounded by the pool",
)
def lists_outgrow_the_pool(bench: Bench) -> Measured:
    rng = bench.rng("outgrow")
    shared = bench.tokens(rng, 40)
    prompts = [[*shared, *bench.tokens(rng, 3)] for _ in range(4)]
    with bench.serve(prefix_cache=False) as served:
        cold = [served.generate([prompt], LOGGED)[0] for prompt in prompts]
    pages = 10 + 4 * 4
    with bench.serve(kv_pages=pages) as served:
        served.generate([shared], Sampling(max_new_tokens=1))
        requests = [served.submit(prompt, LOGGED) for prompt in prompts]
        listed = 0
        served.allow(200)
        while not all(request.done for request in requests):
            served.runtime.step()
            listed = max(listed, sum(len(request.pages) for request in served.engine.scheduler.running))
        for request, expected in zip(requests, cold, strict=True):
            completion = request.completion
            expect(
                completion.error is None,
                observed=f"a request with a shared prefix ended with {completion.error!r}, while lists of {listed} "
                f"pages were in use over a pool of {pages}",
                expected="an answer: the lists are logical",
                cause="the plan's page entries are bounded by the physical pages of the pool",
            )
            require_equal(completion, expected, "four requests over one prefix", WARM_CAUSE, bench)
        expect(
            listed > pages,
            observed=f"at most {listed} pages were listed at once, over a pool of {pages}",
            expected=f"more than {pages}: each of four requests lists the ten pages of the prefix",
            cause="requests with a shared prefix do not share its pages, or are not admitted together: the reserve "
            "counts shared pages for each",
        )
    return {"pages_listed": float(listed), "pages": float(pages)}


@check(
    "prefix.pages-are-counted/1",
    "protocol",
    "A page of the cache is pinned by running requests alone: one that waits for room pins nothing, and pages that "
    "several requests computed at once from the same tokens come back, all but the one that is kept.",
    capability="prefix_cache",
    cause="a pin or a duplicate page is not given back",
)
def pages_are_counted(bench: Bench) -> None:
    rng = bench.rng("counted")
    with bench.serve(limits=Limits(4, 96, 96, 4)) as served:
        prompt = bench.tokens(rng, 22)
        served.generate([prompt] * 3, LOGGED)
        served.require_idle("three requests that computed the same prompt at once (duplicate pages)")
    with bench.serve(limits=Limits(4, 96, 64, 4), kv_pages=16) as served:
        shared = bench.tokens(rng, 17)
        served.generate([shared], Sampling(max_new_tokens=1))
        requests = [served.submit(bench.tokens(rng, 20), Sampling(max_new_tokens=25))]
        served.step()
        requests += [served.submit([*shared, *bench.tokens(rng, 8)], Sampling(max_new_tokens=n)) for n in (20, 4, 22)]
        served.step()
        expect(
            served.stats["requests_waiting"] > 0,
            observed=f"nothing waits: {served.stats}",
            expected="requests that wait for pages: the first takes eleven of sixteen",
            cause="admission does not hold the lifetime of running requests against the pool",
        )
        served.finish(requests)
        served.require_idle("requests that waited for room beside a cached prefix (a pin that is held)")


@check(
    "prefix.eviction/1",
    "protocol",
    "Under pressure the least recently used pages make room; what is evicted is computed again, and what is found is "
    "what was left, never a page that another request has written over.",
    capability="prefix_cache",
    cause="an evicted page can still be found, or a page in use is evicted",
)
def eviction(bench: Bench) -> Measured:
    rng = bench.rng("evict")
    prompts = [bench.tokens(rng, 18) for _ in range(7)]
    order = [0, 1, 0, 2, 3, 0, 4, 5, 6, 1, 0, 6]
    with bench.serve(prefix_cache=False) as served:
        cold = [served.generate([prompt], LOGGED)[0] for prompt in prompts]
    hits = misses = 0
    with bench.serve(kv_pages=16) as served:
        for index in order:
            (found,) = served.generate([prompts[index]], LOGGED)
            hits += found.cached_tokens > 0
            misses += found.cached_tokens == 0
            require_equal(
                found, cold[index], f"prompt {index}, under eviction", "a page was found after it had been freed", bench
            )
            _require_counted(served)
        pairs = [(0, 1), (5, 6), (2, 3)]
        for pair in pairs:
            for found, index in zip(served.generate([prompts[i] for i in pair], LOGGED), pair, strict=True):
                require_equal(found, cold[index], f"prompt {index} beside another", "a page in use was evicted", bench)
        served.require_idle("prompts under eviction")
    _require_oldest_first(bench)
    expect(
        misses > len(prompts) and hits > 0,
        observed=f"{hits} hits and {misses} misses over a pool that holds two prompts",
        expected="some of both",
        cause="nothing is evicted, or nothing is kept",
    )
    return {"hits": float(hits), "misses": float(misses)}


def _require_oldest_first(bench: Bench) -> None:
    """Of two cached prompts, the one that was used last survives a third that needs room."""
    rng = bench.rng("oldest")
    used, unused = (bench.tokens(rng, 18) for _ in range(2))
    third = bench.tokens(rng, 26)
    sampling = Sampling(max_new_tokens=8)
    with bench.serve(kv_pages=16) as served:  # six pages for each of the two, nine for the third
        for prompt in (used, unused, used, third):
            served.generate([prompt], sampling)
        (again,) = served.generate([used], sampling)
        (evicted,) = served.generate([unused], sampling)
        grain = served.stats["prefix_grain_tokens"]
    expect(
        again.cached_tokens == 17 // grain * grain and evicted.cached_tokens < again.cached_tokens,
        observed=f"after a third prompt needed room, the one used last takes {again.cached_tokens} of 18 tokens "
        f"from the cache, the one before it {evicted.cached_tokens}",
        expected=f"{17 // grain * grain} and fewer: the pages of the prompt that was used before it make room",
        cause="eviction does not take the least recently used pages first, or a hit does not count as a use",
    )


def _require_counted(served: Served) -> None:
    stats = served.stats
    total = stats["pages_free"] + stats["pages_cached"] + stats["pages_held"]
    prefix = served.engine.scheduler._holdings.prefix
    findable = len(prefix) if prefix is not None else 0
    expect(
        total == stats["pages_total"] and stats["pages_cached"] == findable,
        observed=f"{stats['pages_free']} free, {stats['pages_cached']} cached, {stats['pages_held']} held of "
        f"{stats['pages_total']}; {findable} pages can be found",
        expected="parts that add up, and as many cached pages as can be found when nothing runs",
        cause="an evicted page can still be found, or eviction or publishing miscounts",
    )


CHECKS = (no_false_hit, hit_length, warm_is_cold, pages_are_counted, lists_outgrow_the_pool, eviction)
