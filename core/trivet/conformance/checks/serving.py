"""Serving: what requests hold comes back, faults stay with the requests that they touch, and a rerun is the same."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from trivet.capacity import Limits
from trivet.conformance.bench import Bench, differing
from trivet.conformance.check import Measured, check
from trivet.conformance.failure import broken, expect
from trivet.conformance.served import Served, said
from trivet.conformance.tiny import TinyModel
from trivet.conformance.twins import ModelWrapper, with_model
from trivet.errors import RequestRejected, RuntimeDown, TrivetError
from trivet.runtime.results import Completion
from trivet.sampling.params import Sampling

GREEDY = Sampling(max_new_tokens=10)
THREAD_TIMEOUT_S = 20.0


class InjectedFault(RuntimeError):
    """Raised by a model of the kit's, on purpose."""


def _same_tokens(found: Completion, alone: Completion, what: str, cause: str) -> None:
    place = differing(found.token_ids, alone.token_ids)
    expect(
        found.token_ids == alone.token_ids and found.error is None,
        observed=f"{what}: tokens {list(found.token_ids)} ({found.finish_reason}), which differ at new token {place}",
        expected=f"{list(alone.token_ids)}, as when the request is served alone",
        cause=cause,
    )


def _alone(bench: Bench, prompts: list[list[int]], sampling: Sampling = GREEDY, **options: Any) -> list[Completion]:
    """Each prompt's answer in a runtime that serves nothing else at that time, and caches nothing."""
    with bench.serve(prefix_cache=False, **options) as served:
        return [served.generate([prompt], sampling)[0] for prompt in prompts]


@check(
    "serving.everything-comes-back/1",
    "protocol",
    "Pages, slots and reservations return however a request ends: by length, by a stop token, by cancel while waiting, "
    "prefilling or decoding, by closing or dropping its stream, or by an error.",
    cause="a way out of the scheduler does not release",
)
def everything_comes_back(bench: Bench) -> Measured:
    rng = bench.rng("release")
    limits = Limits(2, 24, 64, 4)
    with bench.serve(limits=limits) as served:
        served.generate([bench.tokens(rng, n) for n in (5, 17, 2, 30)], GREEDY)
        served.require_idle("requests that ended by length")
        prompt = bench.tokens(rng, 6)
        (first,) = served.generate([prompt], GREEDY)
        stop = Sampling(max_new_tokens=10, stop_token_ids=(first.token_ids[2],))
        (stopped,) = served.generate([prompt], stop)
        expect(
            stopped.finish_reason == "stop" and stopped.token_ids == _through(first.token_ids, first.token_ids[2]),
            observed=f"stop token {first.token_ids[2]}: {list(stopped.token_ids)}, ended by {stopped.finish_reason!r}",
            expected=f"{list(_through(first.token_ids, first.token_ids[2]))}, ended by 'stop'",
            cause="end tokens are compared with another row's token, or dropped from the answer",
        )
        served.require_idle("a stop token")
        for steps in (0, 1, 3):
            requests = [served.submit(bench.tokens(rng, 30), GREEDY) for _ in range(4)]
            for _ in range(steps):
                served.step()
            for request in requests:
                request.cancel()
                request.cancel()
            served.step()
            reasons = {request.completion.finish_reason for request in requests}
            expect(
                reasons == {"cancelled"},
                observed=f"four requests cancelled after {steps} steps ended as {sorted(reasons)}",
                expected="'cancelled', after at most one further step",
                cause="cancel is ignored in this state of a request",
            )
            served.require_idle(f"cancelling after {steps} steps")
        for how in ("closed", "dropped"):
            served.allow(100)
            stream = served.runtime.stream(bench.tokens(rng, 9), GREEDY)
            next(stream)
            if how == "closed":
                stream.close()
            del stream
            served.step()
            served.require_idle(f"a stream that was {how} after one token")
        with contextlib.suppress(RequestRejected):
            served.submit(bench.tokens(rng, 60), GREEDY)
        served.require_idle("a request that was refused")
    return {"ways_out": 9.0}


def _through(tokens: tuple[int, ...], last: int) -> tuple[int, ...]:
    return tokens[: tokens.index(last) + 1]


@check(
    "serving.admission/1",
    "protocol",
    "A request needs pages for prompt + max_new_tokens - 1 tokens. One that exactly fits the pool is served; one that "
    "needs a page more, or a longer context than max_context, is refused at the call, and nothing changes.",
    cause="the gate counts other tokens than the request computes",
)
def admission(bench: Bench) -> None:
    rng = bench.rng("admission")
    limits = Limits(3, 24, 64, 4)
    with bench.serve(limits=limits, kv_pages=5) as served:
        for prompt_tokens, new_tokens in ((1, 20), (20, 1), (11, 10), (17, 4)):
            prompt = bench.tokens(rng, prompt_tokens)
            (completion,) = served.generate([prompt], Sampling(max_new_tokens=new_tokens))
            expect(
                len(completion.token_ids) == new_tokens,
                observed=f"{prompt_tokens} prompt tokens and {new_tokens} new ones: {len(completion.token_ids)} came",
                expected=f"{new_tokens}: their lifetime of {prompt_tokens + new_tokens - 1} tokens fits 5 pages of 4",
                cause="the last new token, which is never computed on, is counted or generation ends early",
            )
        before = served.stats
        for prompt_tokens, new_tokens in ((1, 21), (21, 1), (11, 11), (40, 30)):
            try:
                served.submit(bench.tokens(rng, prompt_tokens), Sampling(max_new_tokens=new_tokens))
            except RequestRejected:
                continue
            broken(
                observed=f"{prompt_tokens} prompt tokens and {new_tokens} new ones were accepted, with 5 pages of 4 "
                "tokens",
                expected="RequestRejected at the call",
                cause="the gate counts fewer pages than the request's lifetime takes: it would wait for ever, or run "
                "out of pages in a step",
            )
        expect(
            served.stats == before,
            observed=f"counters changed by refused requests: {before} to {served.stats}",
            expected="nothing changed",
            cause="a request is entered before it is checked",
        )
        prompts = [bench.tokens(rng, int(n)) for n in rng.integers(1, 12, 7)]
        samplings = [Sampling(max_new_tokens=int(n)) for n in rng.integers(1, 9, 7)]
        requests = [served.submit(p, s) for p, s in zip(prompts, samplings, strict=True)]
        reports = served.finish(requests)
        failed = [request.completion for request in requests if request.completion.error is not None]
        expect(
            not failed,
            observed=f"{len(failed)} of 7 requests that wait for pages failed: {failed[0].error if failed else ''}",
            expected="each served once its pages are free",
            cause="admission forgets what admitted requests may still take, so that a step runs out of pages",
        )
        rows = max(report.rows for report in reports)
        tokens = max(report.prefill_tokens + report.decode_tokens for report in reports)
        expect(
            rows <= limits.max_requests and tokens <= max(limits.max_step_tokens, 24),
            observed=f"a step held {rows} rows and {tokens} tokens",
            expected=f"at most max_requests ({limits.max_requests}) and max_step_tokens ({limits.max_step_tokens})",
            cause="the scheduler gives out more than the limits allow",
        )
        served.require_idle("a queue for five pages")


@check(
    "serving.fault-stays-with-its-step/1",
    "protocol",
    "A step that raises ends the requests in it with that error, and returns what they held; requests outside it, and "
    "later ones, get the tokens that they would have got.",
    cause="an error in a step is swallowed, or taken out on others",
)
def fault_stays_with_its_step(bench: Bench) -> None:
    armed: list[bool] = []

    class Faulty(ModelWrapper):
        def __call__(self, token_ids: torch.Tensor, step: Any) -> torch.Tensor:
            hidden = super().__call__(token_ids, step)
            if armed:
                armed.pop()
                raise InjectedFault("raised by conformance in the middle of a step")
            return hidden

    rng = bench.rng("fault")
    limits = Limits(2, 24, 64, 4)
    prompts = [bench.tokens(rng, n) for n in (7, 9, 13, 6)]
    alone = _alone(bench, prompts, limits=limits)
    with bench.serve(family=with_model(bench.family, Faulty), limits=limits) as served:
        touched = [served.submit(prompt, GREEDY) for prompt in prompts[:2]]
        waiting = served.submit(prompts[2], GREEDY)
        for _ in range(3):
            served.step()
        armed.append(True)
        report = served.step()
        for request in touched:
            completion = request.completion
            expect(
                request.done and completion.finish_reason == "error" and isinstance(completion.error, InjectedFault),
                observed=f"a request in the step that raised: done {request.done}, {completion.finish_reason!r}, error "
                f"{completion.error!r}",
                expected="done, 'error', with the exception that the step raised",
                cause="the error is swallowed: the step's requests go on, or end as if nothing had happened",
            )
        expect(
            report.failed == 2 and served.stats["requests_failed"] == 2 and served.stats["requests_running"] == 0,
            observed=f"the step reports {report.failed} failed requests, the counters "
            f"{served.stats['requests_failed']}, running {served.stats['requests_running']}",
            expected="2 failed, and none of them still running",
            cause="the failed step's requests are not ended with it",
        )
        later = served.submit(prompts[3], GREEDY)
        again = served.submit(prompts[0], GREEDY)
        served.finish([waiting, later, again])
        for request, expected, what in (
            (waiting, alone[2], "a request that waited while the step failed"),
            (later, alone[3], "a request that came after the failed step"),
            (again, alone[0], "the failed request's prompt, asked again"),
        ):
            _same_tokens(
                request.completion,
                expected,
                what,
                "pages or recurrent slots of the failed requests came back in a state that reaches others, or pages "
                "of the failed step were published to the prefix cache",
            )
        served.require_idle("a step that raised")


@check(
    "serving.unusable-row-ends-alone/1",
    "protocol",
    "A row whose logits hold no usable number ends with an error, by itself: the other rows of the step, and whoever "
    "gets its pages and slot next, are not reached by its NaN.",
    cause="one row's NaN reaches another",
)
def unusable_row_ends_alone(bench: Bench) -> None:
    tiny = bench.untied()
    rng = bench.rng("unusable")
    prompts = [[token % 10 for token in bench.tokens(rng, n, tiny)] for n in (9, 14, 8, 11)]
    sampling = Sampling(max_new_tokens=6)
    with bench.serve(tiny, prefix_cache=False) as served:
        alone = [served.generate([prompt], sampling)[0] for prompt in prompts]
    seen = {token for tokens in (*prompts, *(answer.token_ids for answer in alone)) for token in tokens}
    poison = next(token for token in range(tiny.vocab_size) if token not in seen)
    with bench.serve(tiny, limits=Limits(3, 24, 64, 4), kv_pages=20) as served:
        _embedding(served, tiny, prompts[0])[poison] = float("nan")
        requests = [served.submit(prompt, sampling) for prompt in prompts[:2]]
        unusable = served.submit([*prompts[2][:5], poison, *prompts[2][5:]], sampling)
        served.finish([*requests, unusable])
        completion = unusable.completion
        expect(
            completion.finish_reason == "error" and completion.error is not None and not completion.token_ids,
            observed=f"a prompt whose hidden states are NaN: {completion.finish_reason!r}, tokens "
            f"{list(completion.token_ids)}, error {completion.error!r}",
            expected="no token, 'error', and an error that says so",
            cause="logits are sampled from without a look at whether they are numbers: the error is swallowed",
        )
        for request, expected in zip(requests, alone, strict=False):
            _same_tokens(
                request.completion,
                expected,
                "a request beside a row of NaN",
                "a layer mixes rows, or attention reads pages that its row does not list",
            )
        for prompt, expected in zip(prompts[2:], alone[2:], strict=True):
            (after,) = served.generate([prompt], sampling)
            _same_tokens(
                after,
                expected,
                "a request that got the pages and the slot of a row of NaN",
                "the tail of a page, a slot that is not cleared, or a page that was published from an unusable row is "
                "read",
            )
        served.require_idle("an unusable row")


def _embedding(served: Served, tiny: TinyModel, tokens: list[int]) -> torch.Tensor:
    """The embedding ``[vocabulary, hidden_size]``: the matrix whose row matters only to inputs of that token."""
    spare = tiny.vocab_size - 1
    for spec in tiny.weight_map.parameters:
        if spec.shape == (tiny.vocab_size, tiny.geometry.hidden_size):
            matrix = served.engine.owned["weights"][spec.name].view(spec.shape)
            held = matrix[spare].clone()
            matrix[spare] = float("nan")
            finite = bool(served.score(tokens).isfinite().all())
            matrix[spare] = held
            if finite:
                return matrix
    broken(
        observed="each parameter with a row for every token changes what is said of other tokens",
        expected="an embedding, of which only the rows of a prompt's tokens are read",
        cause="the embedding is also the output projection, although the config does not tie them",
    )


@check(
    "serving.close-releases/1",
    "protocol",
    "close ends open requests with RuntimeDown, releases every buffer and may be called twice; whatever is called "
    "afterwards raises RuntimeDown.",
    cause="a closed runtime keeps memory or requests",
)
def close_releases(bench: Bench) -> None:
    served = bench.serve()
    prompt = bench.tokens(bench.rng("close"), 9)
    request = served.submit(prompt, GREEDY)
    served.step()
    engine = served.engine
    served.close()
    served.close()
    expect(
        request.done and isinstance(request.completion.error, RuntimeDown),
        observed=f"an open request after close: done {request.done}, error {request.completion.error!r}",
        expected="done, with RuntimeDown",
        cause="close leaves requests open, whose callers wait for ever",
    )
    held = {name: buffers.storage_bytes for name, buffers in engine.owned.items() if buffers.storage_bytes}
    expect(
        not held,
        observed=f"bytes still held after close: {held}",
        expected="none",
        cause="a buffer is missing from what close releases",
    )
    for what, call in (
        ("generate", lambda: served.runtime.generate([prompt], GREEDY)),
        ("submit", lambda: served.runtime.submit(prompt, GREEDY)),
        ("score", lambda: served.runtime.score(prompt)),
        ("stats", served.runtime.stats),
    ):
        try:
            call()
        except RuntimeDown:
            continue
        except Exception as error:
            broken(
                observed=f"{what} after close raises {type(error).__name__}: {error}",
                expected="RuntimeDown",
                cause=f"{what} reaches the engine without asking whether it is up",
            )
        broken(
            observed=f"{what} after close returned",
            expected="RuntimeDown",
            cause=f"{what} does not ask whether the runtime is up",
        )


@check(
    "serving.deterministic/1",
    "protocol",
    "The same run twice is bit-identical: tokens, log-probabilities and scores, greedy and drawn.",
    cause="something besides weights, requests and seed decides a result",
)
def deterministic(bench: Bench) -> None:
    rng = bench.rng("deterministic")
    prompts = [bench.tokens(rng, int(n)) for n in rng.integers(1, 40, 7)]
    sampling = [
        Sampling(max_new_tokens=8, logprobs=4, temperature=0.0 if index % 2 else 0.9, top_p=0.95)
        for index in range(len(prompts))
    ]
    runs = []
    for _ in range(2):
        with bench.serve() as served:
            runs.append((said(served.generate(prompts, sampling)), served.score(prompts[0] + prompts[1])))
    expect(
        runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1]),
        observed=f"tokens equal: {[a[0] == b[0] for a, b in zip(runs[0][0], runs[1][0], strict=True)]}, "
        f"log-probabilities equal: {[a[1] == b[1] for a, b in zip(runs[0][0], runs[1][0], strict=True)]}, "
        f"scores equal: {torch.equal(runs[0][1], runs[1][1])}",
        expected="two runs that are equal bit for bit",
        cause="uninitialised memory is read, a draw has no seed, or an order depends on hashes, ids or the clock",
    )


@check(
    "serving.decode-allocates-nothing/1",
    "protocol",
    "A pure decode step allocates nothing through layouts and pools: stats()['device_allocations'] stands still.",
    cause="a buffer is allocated while serving",
)
def decode_allocates_nothing(bench: Bench) -> Measured:
    rng = bench.rng("decode")
    with bench.serve() as served:
        requests = [served.submit(bench.tokens(rng, 5), Sampling(max_new_tokens=20)) for _ in range(4)]
        while served.step().path != "decode":
            pass
        before = served.stats["device_allocations"]
        steps = len(served.finish(requests))
        grown = served.stats["device_allocations"] - before
        expect(
            grown == 0 and steps > 10,
            observed=f"{grown} allocations in {steps} decode steps",
            expected="none",
            cause="an owner, a cache or the sampler allocates in a step instead of using what was reserved",
        )
    return {"decode_steps": float(steps)}


@check(
    "serving.stream-is-generate/1",
    "protocol",
    "Streaming gives the tokens of generate, one at a time, with the finish reason on the last alone.",
    cause="streaming takes another way than generate",
)
def stream_is_generate(bench: Bench) -> None:
    prompt = bench.tokens(bench.rng("stream"), 11)
    with bench.serve() as served:
        (whole,) = served.generate([prompt], GREEDY)
        served.allow(200)
        tokens = list(served.runtime.stream(prompt, GREEDY))
    streamed = tuple(token.token_id for token in tokens)
    reasons = [token.finish_reason for token in tokens]
    expect(
        streamed == whole.token_ids and reasons == [None] * (len(tokens) - 1) + ["length"],
        observed=f"streamed {list(streamed)} with finish reasons {reasons}",
        expected=f"{list(whole.token_ids)}, and 'length' on the last",
        cause="a token is lost or repeated between the step and its reader",
    )


@check(
    "serving.dropped-row-leaves-others/1",
    "protocol",
    "Dropping a request in the middle of a batch, and giving its place to another, changes no token of the rest: rows "
    "move together, slots and pages do not.",
    cause="what belongs to a request is found by its row instead of its slot",
)
def dropped_row_leaves_others(bench: Bench) -> None:
    rng = bench.rng("drop")
    prompts = [bench.tokens(rng, n) for n in (9, 5, 14, 7, 10, 3)]
    sampling = Sampling(max_new_tokens=16)
    alone = _alone(bench, prompts, sampling)
    with bench.serve() as served:
        requests = [served.submit(prompt, sampling) for prompt in prompts[:4]]
        for _ in range(5):
            served.step()
        requests[1].cancel()
        served.step()
        requests.append(served.submit(prompts[4], sampling))
        for _ in range(2):
            served.step()
        requests[0].cancel()
        requests.append(served.submit(prompts[5], sampling))
        served.finish(requests)
        for index in (2, 3, 4, 5):
            _same_tokens(
                requests[index].completion,
                alone[index],
                f"request {index}, while requests 1 and 0 were dropped from the batch",
                "state of a request is kept by row: after compaction a row reads its neighbour's recurrent state, "
                "sampling slot or pages",
            )
        served.require_idle("a batch with two requests dropped")


@check(
    "serving.end-tokens/1",
    "protocol",
    "eos_token_id, one or a list, of generation_config.json or else of config.json, ends a request by 'stop', with the "
    "end token as the last of its tokens; ignore_eos goes on.",
    cause="end tokens are read or compared wrongly",
)
def end_tokens(bench: Bench) -> None:
    tiny = bench.tiny()
    prompt = bench.tokens(bench.rng("end"), 8)
    with bench.serve() as served:
        (free,) = served.generate([prompt], GREEDY)
    last = next((i for i, token in enumerate(free.token_ids) if i and token not in free.token_ids[:i]), 0)
    end, other = free.token_ids[last], next(t for t in range(tiny.vocab_size) if t not in free.token_ids)
    text = tiny.config.get("text_config")
    for place, stated in (
        ("config.json", end),
        ("config.json", [other, end]),
        ("generation_config.json", [end, other]),
    ):
        value: object = stated if place == "config.json" else other
        config = {**tiny.config, "eos_token_id": value}
        if isinstance(text, Mapping):  # it decides; what the root repeats need not be the language model's
            config = {**tiny.config, "eos_token_id": other, "text_config": {**text, "eos_token_id": value}}
        ended = bench.variant("ended", config, tiny.tensors)
        generation = ended.directory / "generation_config.json"
        generation.unlink(missing_ok=True)
        if place == "generation_config.json":
            generation.write_text(json.dumps({"eos_token_id": stated}))
        with bench.serve(ended) as served:
            (stopped,) = served.generate([prompt], GREEDY)
            (ignored,) = served.generate([prompt], Sampling(max_new_tokens=10, ignore_eos=True))
        wanted = free.token_ids[: last + 1]
        expect(
            stopped.token_ids == wanted and stopped.finish_reason == "stop" and ignored.token_ids == free.token_ids,
            observed=f"with eos_token_id {stated} in {place}: {list(stopped.token_ids)}, ended by "
            f"{stopped.finish_reason!r}; with ignore_eos {list(ignored.token_ids)}",
            expected=f"{list(wanted)} by 'stop'; with ignore_eos {list(free.token_ids)}",
            cause="eos_token_id is read from another place (text_config before the root, generation_config.json before "
            "both), one of a list is left out, or the end token is dropped from the answer",
        )
    generation.unlink()


@check(
    "serving.refused-at-the-call/1",
    "protocol",
    "An empty prompt, token ids outside the vocabulary, text without a tokenizer and settings that make no sense are "
    "refused at the call, and change nothing.",
    cause="what a caller passes is used before it is checked",
)
def refused_at_the_call(bench: Bench) -> Measured:
    vocabulary = bench.tiny().vocab_size
    refused = 0
    with bench.serve() as served:
        before = served.stats
        asks: dict[str, Callable[[], object]] = {
            "an empty prompt": lambda: served.submit([], GREEDY),
            "a token id of the vocabulary's size": lambda: served.submit([1, vocabulary], GREEDY),
            "a negative token id": lambda: served.submit([-1], GREEDY),
            "text without a tokenizer": lambda: served.runtime.submit("text", GREEDY),
            "no new tokens": lambda: served.submit([1], Sampling(max_new_tokens=0)),
            "a negative temperature": lambda: served.submit([1], Sampling(temperature=-1.0)),
            "a temperature that is no number": lambda: served.submit([1], Sampling(temperature=float("nan"))),
            "top_p of 0": lambda: served.submit([1], Sampling(top_p=0.0)),
            "a score of nothing": lambda: served.runtime.score([]),
        }
        for what, ask in asks.items():
            try:
                ask()
            except TrivetError:
                refused += 1
                continue
            except Exception as error:
                broken(
                    observed=f"{what}: {type(error).__name__}: {error}",
                    expected="RequestRejected",
                    cause="the value reaches something that does not expect it",
                )
            broken(
                observed=f"{what} was accepted",
                expected="RequestRejected at the call",
                cause="it is not checked, and would fail a step or read outside the embedding",
            )
        expect(
            served.stats == before,
            observed=f"counters after refused calls: {served.stats}",
            expected=f"{before}",
            cause="a request is entered before it is checked",
        )
    return {"refused": float(refused)}


@check(
    "serving.text/1",
    "protocol",
    "Streamed texts joined are the completion's text, which holds no stop string; a stop string ends the request by "
    "'stop'.",
    cause="text is withheld or released wrongly",
)
def text(bench: Bench) -> None:
    tiny = bench.tiny()
    shipped = Path(str(resources.files("trivet"))) / "models" / "tiny-qwen3" / "tokenizer.json"
    written = bench.variant("text", tiny.config, tiny.tensors)
    shutil.copy(shipped, written.directory)
    prompt = bench.tokens(bench.rng("text"), 5)
    sampling = Sampling(max_new_tokens=24)
    with bench.serve(written) as served:
        (whole,) = served.generate([prompt], sampling)
        served.allow(200)
        joined = "".join(token.text for token in served.runtime.stream(prompt, sampling))
        expect(
            joined == whole.text and len(whole.text) > 4,
            observed=f"streamed {joined!r}",
            expected=f"{whole.text!r}",
            cause="a piece of text is lost, repeated or not released with the last token",
        )
        stop = whole.text[len(whole.text) // 2 :][:2]
        stopped, *_ = served.generate([prompt], Sampling(max_new_tokens=24, stop=(stop,)))
        before = whole.text[: whole.text.index(stop)]
        expect(
            stopped.text == before and stopped.finish_reason == "stop",
            observed=f"with stop string {stop!r}: {stopped.text!r}, ended by {stopped.finish_reason!r}",
            expected=f"{before!r}, ended by 'stop'",
            cause="a stop string is not found where it spans tokens, or stays in the text",
        )


@check(
    "serving.own-thread/1",
    "protocol",
    "A runtime that steps on its own thread answers callers on others: their tokens are those of a runtime that is "
    "driven by hand.",
    cause="the thread dies, sleeps through a request or lets two steps overlap",
)
def own_thread(bench: Bench) -> None:
    rng = bench.rng("thread")
    prompts = [bench.tokens(rng, int(n)) for n in rng.integers(1, 20, 6)]
    alone = _alone(bench, prompts)
    with bench.serve(autostart=True) as served:
        served.allow(2000)
        requests = [served.submit(prompt, GREEDY) for prompt in prompts]
        for request, expected in zip(requests, alone, strict=True):
            expect(
                request.wait(THREAD_TIMEOUT_S),
                observed=f"a request was not done after {THREAD_TIMEOUT_S:g} s, counters {served.stats}",
                expected="an answer",
                cause="the runtime's thread is not woken by a submission, or has died",
            )
            _same_tokens(request.completion, expected, "served by the runtime's thread", "steps overlap")
        served.require_idle("requests that the runtime's thread served")


EARLY_CHECKS = (admission,)
CHECKS = (
    everything_comes_back,
    fault_stays_with_its_step,
    unusable_row_ends_alone,
    close_releases,
    deterministic,
    decode_allocates_nothing,
    stream_is_generate,
    end_tokens,
    refused_at_the_call,
    text,
    own_thread,
    dropped_row_leaves_others,
)
