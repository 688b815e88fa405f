"""Both sides of each capability: what a family declares unsupported is refused, by name, when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from trivet.capacity import Limits
from trivet.conformance.bench import Bench
from trivet.conformance.check import Check, Measured, check
from trivet.conformance.failure import broken, expect
from trivet.conformance.twins import restricted
from trivet.errors import ConfigError, RequestRejected
from trivet.plugin.capabilities import Capabilities
from trivet.plugin.family import ModelFamily
from trivet.sampling.params import Sampling

Refusal = Callable[[Bench, ModelFamily], None]


def refusal(bench: Bench, capability: str, family: ModelFamily | None = None) -> None:
    """`Broken` unless `family`, which declares `capability` unsupported, refuses it."""
    family = family or restricted(bench.family, capability)
    try:
        family.require(capability)
    except ConfigError as error:
        _require_named(capability, error)
    else:
        broken(
            observed=f"require({capability!r}) of a family that does not support it returned",
            expected="the defined ConfigError",
            cause="the declared capabilities are ignored",
        )
    _REFUSALS[capability](bench, family)


def _require_named(capability: str, error: ConfigError) -> None:
    expect(
        capability in str(error) and Capabilities.instead(capability) in str(error),
        observed=f"ConfigError: {error}",
        expected=f"the error of ModelFamily.require: it names {capability!r}, and says to "
        f"{Capabilities.instead(capability)}",
        cause="something else refuses, and does not say which capability is missing and what to do instead",
    )


def _refused(capability: str, ask: Callable[[], object]) -> None:
    try:
        ask()
    except ConfigError as error:
        _require_named(capability, error)
        return
    except Exception as error:
        broken(
            observed=f"asking for {capability} ends in {type(error).__name__}: {error}",
            expected="the ConfigError of ModelFamily.require",
            cause="the capability is used before it is asked whether the family supports it",
        )
    broken(
        observed=f"{capability} was granted, though the family declares it unsupported",
        expected="the ConfigError of ModelFamily.require",
        cause="the declared capability is ignored where it is asked for",
    )


def _prefix_cache(bench: Bench, family: ModelFamily) -> None:
    _refused("prefix_cache", lambda: bench.serve(family=family, prefix_cache=True).close())
    prompt = bench.tokens(bench.rng("refusal"), 21)
    with bench.serve(family=family, prefix_cache=False) as served:
        answers = [served.generate([prompt])[0] for _ in range(2)]
        expect(
            answers[1].cached_tokens == 0 and served.stats["pages_cached"] == 0,
            observed=f"without a prefix cache, {answers[1].cached_tokens} tokens came from it and "
            f"{served.stats['pages_cached']} pages are kept",
            expected="none",
            cause="prefix_cache=False is ignored",
        )


def _chunked_prefill(bench: Bench, family: ModelFamily) -> None:
    family = restricted(family, "prefix_cache")  # a snapshot boundary would cut a prompt
    limits = Limits(3, 16, 64, 4)
    rng = bench.rng("refusal")
    with bench.serve(family=family, limits=limits, exact_limits=True) as served:
        try:
            served.generate([bench.tokens(rng, 17)])
        except RequestRejected as error:
            expect(
                "max_step_tokens" in str(error),
                observed=f"RequestRejected: {error}",
                expected="an error that names max_step_tokens",
                cause="the prompt is refused for another reason",
            )
        else:
            broken(
                observed="a prompt of 17 tokens was computed in steps of 16, though prompts are computed whole",
                expected="RequestRejected that names max_step_tokens",
                cause="the declared capability chunked_prefill is ignored by admission or by the scheduler",
            )
        prompts = [bench.tokens(rng, n) for n in (13, 9, 5, 16)]
        requests = [served.submit(prompt, Sampling(max_new_tokens=3)) for prompt in prompts]
        reports = served.finish(requests)
        whole = {sum(some) for some in _subsets([13, 9, 5, 16])}
        split = [report.prefill_tokens for report in reports if report.prefill_tokens not in whole]
        expect(
            not split,
            observed=f"steps computed {split} prompt tokens, of prompts of 13, 9, 5 and 16",
            expected="whole prompts in every step",
            cause="the declared capability chunked_prefill is ignored by the scheduler",
        )


def _subsets(values: list[int]) -> list[list[int]]:
    subsets: list[list[int]] = [[]]
    for value in values:
        subsets += [[*some, value] for some in subsets]
    return subsets


def _mixed_steps(bench: Bench, family: ModelFamily) -> None:
    rng = bench.rng("refusal")
    with bench.serve(family=family) as served:
        requests = [served.submit(bench.tokens(rng, n), Sampling(max_new_tokens=6)) for n in (3, 30, 11, 40)]
        paths = [report.path for report in served.finish(requests)]
        expect(
            "mixed" not in paths and {"prefill", "decode"} <= set(paths),
            observed=f"steps were {paths}",
            expected="prefill and decode steps, none of them mixed",
            cause="the declared capability mixed_steps is ignored by the scheduler",
        )


def _cuda_graphs(bench: Bench, family: ModelFamily) -> None:
    _refused("cuda_graphs", lambda: bench.blueprint(family=family, device="h200", cuda_graphs=True))
    bench.blueprint(family=family, device="h200", cuda_graphs=False)


def _tied_embeddings(bench: Bench, family: ModelFamily) -> None:
    tiny = bench.tied()
    _refused("tied_embeddings", lambda: bench.serve(tiny, family=family).close())


def _pinned_policy(bench: Bench, family: ModelFamily) -> None:
    _refused("pinned_policy", lambda: bench.blueprint(family=family, numeric_policy="pinned"))


_REFUSALS: dict[str, Refusal] = {
    "prefix_cache": _prefix_cache,
    "chunked_prefill": _chunked_prefill,
    "mixed_steps": _mixed_steps,
    "cuda_graphs": _cuda_graphs,
    "tied_embeddings": _tied_embeddings,
    "pinned_policy": _pinned_policy,
}


def _check_of(capability: str) -> Check:
    @check(
        f"capability.{capability.replace('_', '-')}-refusal/1",
        "protocol",
        f"A family that declares {capability} unsupported is never asked for it: "
        f"{Capabilities.meaning(capability)}. Asking raises the ConfigError that says what to do instead.",
        cause="the declared capability is not looked at where it is used",
    )
    def refuses(bench: Bench) -> Measured | None:
        refusal(bench, capability)
        return None

    return refuses


CHECKS = tuple(_check_of(capability) for capability in Capabilities.names())
