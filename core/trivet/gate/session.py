"""Requests that the gate serves step by step, with whatever it does between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from trivet.errors import TrivetError
from trivet.sampling.params import Sampling

if TYPE_CHECKING:
    from trivet.runtime.handle import Request
    from trivet.runtime.runtime import Runtime
    from trivet.runtime.step import StepReport
    from trivet.sampling.logprobs import TokenLogprob

ALTERNATIVES = 64
"""Log-probabilities that are compared at each position: the most probable of the reference."""


class GateError(TrivetError):
    """The gate could not be run: what was to be compared does not fit together."""


@frozen(eq=False)
class Served:
    """What the runtime answered to one request: the sequence that the reference is shown.

    Attributes:
        prompt: token ids.
        token_ids: new tokens, greedy.
        logprobs: one entry for each, with `ALTERNATIVES` alternatives.
        cached_tokens: prompt tokens that came from the prefix cache.
    """

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    cached_tokens: int


class Session:
    """Some requests on a runtime that nobody else drives.

    Attributes:
        reports: of every step so far.
        faults: what became of requests that did not end as they should.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.reports: list[StepReport] = []
        self.faults: list[str] = []
        self._open: list[tuple[tuple[int, ...], int, Request]] = []

    def submit(self, prompt: Sequence[int], new_tokens: int) -> Request:
        """Queue a request for exactly `new_tokens` greedy tokens."""
        sampling = Sampling(max_new_tokens=new_tokens, ignore_eos=True, logprobs=ALTERNATIVES)
        request = self.runtime.submit(list(prompt), sampling)
        self._open.append((tuple(prompt), new_tokens, request))
        return request

    def step(self) -> StepReport:
        """One step.

        Raises:
            GateError: there was nothing to do.
        """
        report = self.runtime.step()
        if report.path == "idle":
            raise GateError("the runtime was idle though requests were open: kv_pages or a limit is too small")
        self.reports.append(report)
        return report

    @property
    def open(self) -> bool:
        """Whether any request is not done."""
        return any(not request.done for _, _, request in self._open)

    def finish(self) -> list[Served]:
        """Step until every request is done; what they gave, but for those that were cancelled."""
        while self.open:
            self.step()
        served = []
        for prompt, new_tokens, request in self._open:
            completion = request.completion
            if completion.finish_reason == "cancelled":
                continue
            if completion.finish_reason != "length" or len(completion.token_ids) != new_tokens:
                cause = f": {completion.error}" if completion.error is not None else ""
                self.faults.append(
                    f"a request of {len(prompt)} tokens ended as {completion.finish_reason!r} after "
                    f"{len(completion.token_ids)} of {new_tokens} new tokens{cause}"
                )
            elif completion.logprobs is not None:
                served.append(Served(prompt, completion.token_ids, completion.logprobs, completion.cached_tokens))
        return served
