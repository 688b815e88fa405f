"""Traffic through a runtime's own thread, and whether every request was given what it is given alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from attrs import frozen
from tests.support.runtimes import assert_at_rest

import trivet

Load = Callable[..., trivet.Runtime]
"""Loads one runtime with the keyword arguments of `trivet.Runtime.load` that are given, on top of its own."""


@frozen
class Traffic:
    """What is asked of a runtime.

    Attributes:
        prompts, samplings: one for each request.
        cancelled: requests that are cancelled after some others have been submitted.
    """

    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[trivet.Sampling, ...]
    cancelled: frozenset[int]


@frozen
class Served:
    """What came of it.

    Attributes:
        finished, cancelled: how many requests ended so.
        most_waiting: the most requests that were seen waiting.
        hit_tokens: prompt tokens that came from the prefix cache.
        graph_steps: steps that were replayed.
        together_s, alone_s: how long the requests took together, and one by one.
    """

    finished: int
    cancelled: int
    most_waiting: int
    hit_tokens: int
    graph_steps: int
    together_s: float
    alone_s: float


def drawn_traffic(
    vocabulary: int, *, requests: int = 200, longest_prompt: int = 200, most_new: int = 24, seed: int = 0
) -> Traffic:
    """Prompts of mixed lengths, of which half begin alike; greedy, drawn and reported; a tenth is cancelled."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocabulary, (count,), generator=generator).tolist())

    shared = [tokens(longest_prompt // 2), tokens(longest_prompt // 3)]
    prompts, samplings = [], []
    for request in range(requests):
        head = shared[request // 2 % 2][: number(longest_prompt // 6, longest_prompt // 2)] if request % 2 else ()
        prompts.append((*head, *tokens(number(1, longest_prompt - len(head)))))
        new = number(1, most_new)
        samplings.append(
            [
                trivet.Sampling(max_new_tokens=new, ignore_eos=True),
                trivet.Sampling(max_new_tokens=new, ignore_eos=True, temperature=0.8, seed=request),
                trivet.Sampling(max_new_tokens=new, ignore_eos=True, temperature=0.9, seed=request, top_p=0.9),
                trivet.Sampling(max_new_tokens=new, ignore_eos=True, logprobs=3),
            ][request % 4]
        )
    cancelled = torch.randperm(requests, generator=generator)[: requests // 10].tolist()
    return Traffic(tuple(prompts), tuple(samplings), frozenset(cancelled))


def assert_served_as_alone(load: Load, traffic: Traffic) -> Served:
    """Serve `traffic` at once, then each finished request alone, and compare tokens and log-probabilities bit for bit.

    Args:
        load: called twice, with keyword arguments of `trivet.Runtime.load`: with ``autostart=True`` for all requests
            at once, then without a prefix cache for one at a time. Both must give the same weights, and as few
            ``kv_pages`` as shall be fought for.

    Raises:
        AssertionError: a request was given something else than alone, ended otherwise than it should, or left pages or
            a slot behind.
    """
    count = len(traffic.prompts)
    most_waiting = 0
    with load(autostart=True) as runtime:
        started = time.perf_counter()
        handles: list[trivet.Request] = []
        for prompt, sampling in zip(traffic.prompts, traffic.samplings, strict=True):
            handles.append(runtime.submit(list(prompt), sampling))
            if len(handles) % 10 == 0:
                for request in traffic.cancelled:
                    if len(handles) - 30 <= request < len(handles) - 15:
                        handles[request].cancel()
                most_waiting = max(most_waiting, runtime.stats()["requests_waiting"])
                time.sleep(0.002)  # so that requests arrive while others decode
        for request in traffic.cancelled:
            handles[request].cancel()
        for request, handle in enumerate(handles):
            assert handle.wait(300), f"request {request} does not end"
        together_s = time.perf_counter() - started
        runtime.run_until_idle()
        deadline = time.perf_counter() + 10
        while runtime.stats()["pages_held"] and time.perf_counter() < deadline:
            time.sleep(0.01)  # the last step may be in flight, with rows of requests that have ended
        assert_at_rest(runtime)
        stats = runtime.stats()
        together = [handle.completion for handle in handles]
    reasons = [completion.finish_reason for completion in together]
    for request, completion in enumerate(together):
        assert completion.finish_reason in ({"length", "cancelled"} if request in traffic.cancelled else {"length"}), (
            request,
            completion.error,
        )
    with load(autostart=False, prefix_cache=False) as runtime:
        started = time.perf_counter()
        for request, there in enumerate(together):
            if there.finish_reason == "length":
                prompt, sampling = traffic.prompts[request], traffic.samplings[request]
                (alone,) = runtime.generate([list(prompt)], sampling)
                assert alone.token_ids == there.token_ids, f"request {request}: tokens differ from those alone"
                assert alone.logprobs == there.logprobs, f"request {request}: log-probabilities differ from those alone"
        alone_s = time.perf_counter() - started
        assert_at_rest(runtime)
    return Served(
        finished=reasons.count("length"),
        cancelled=count - reasons.count("length"),
        most_waiting=most_waiting,
        hit_tokens=stats["prefix_hit_tokens"],
        graph_steps=stats["graph_steps"],
        together_s=together_s,
        alone_s=alone_s,
    )
