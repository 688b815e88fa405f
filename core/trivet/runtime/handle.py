"""A submitted request as its caller holds it."""

from __future__ import annotations

import math
import numbers
import threading
import time
from collections.abc import Callable

from trivet.errors import RequestRejected
from trivet.runtime.output import Produced, RequestOutput
from trivet.runtime.results import Completion, Timings, Token
from trivet.scheduler.request import Request as ScheduledRequest
from trivet.text.detokenizer import StreamDecoder


class Request:
    """A request in a runtime. Every member may be used from any thread.

    Made by `Runtime.submit`; not constructed by callers.
    """

    def __init__(
        self,
        scheduled: ScheduledRequest,
        output: RequestOutput,
        cancel: Callable[[ScheduledRequest], None],
        new_decoder: Callable[[], StreamDecoder | None],
        drive: Callable[[], object] | None = None,
        check_steps: Callable[[], None] = lambda: None,
    ) -> None:
        self._scheduled = scheduled
        self._output = output
        self._cancel = cancel
        self._new_decoder = new_decoder
        self._drive = drive
        self._check_steps = check_steps
        self._final: dict[str, Completion] = {}

    @property
    def id(self) -> int:
        """Number of the request within its runtime."""
        return self._scheduled.id

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._output.done

    @property
    def completion(self) -> Completion:
        """What the request has given so far; final, and always the same object, once it is done."""
        if "completion" in self._final:
            return self._final["completion"]
        done = self._output.done
        completion = self._summary()
        # atomic, so that threads that ask at once are given the same one
        return self._final.setdefault("completion", completion) if done else completion

    def cancel(self) -> None:
        """Ask for the end of the request. Does nothing if it is done; may be called twice.

        After at most one further step it is done with finish_reason ``"cancelled"``, and its pages and slot are back.
        """
        self._cancel(self._scheduled)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the request is done; False if `timeout` seconds passed before.

        Where the runtime has no thread of its own, this steps it.

        Args:
            timeout: None, or more than a system can wait, waits for as long as it takes.

        Raises:
            RequestRejected: `timeout` is not a number.
            RuntimeDown: nobody steps in this process, which was forked from the one that loaded the runtime.
        """
        timeout = _seconds(timeout)
        if not self.done:
            self._check_steps()
        if self._drive is None:
            return self._output.wait(timeout)
        give_up_s = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            if give_up_s is not None and time.monotonic() >= give_up_s:
                return False
            self._drive()
        return True

    def _summary(self) -> Completion:
        produced = self._output.entries()
        wants_logprobs = self._scheduled.sampling is not None and self._scheduled.sampling.logprobs is not None
        return Completion(
            token_ids=tuple(entry.token_id for entry in produced),
            text=self._text(produced),
            finish_reason=self._output.finish_reason or "",
            error=self._output.error,
            logprobs=tuple(p.logprob for p in produced if p.logprob is not None) if wants_logprobs else None,
            prompt_tokens=self._scheduled.prompt_tokens,
            cached_tokens=self._scheduled.cached_tokens,
            timings=self._timings(len(produced)),
        )

    def _text(self, produced: list[Produced]) -> str:
        if self._output.stop_decoder is not None:
            return "".join(entry.piece or "" for entry in produced) + self._output.withheld
        reader = TokenReader(self._new_decoder())
        return "".join(reader.read(entry).text for entry in produced) + reader.rest()

    def _timings(self, new_tokens: int) -> Timings:
        request = self._scheduled
        submitted = request.submitted_s or 0.0
        admitted = request.admitted_s if request.admitted_s is not None else request.finished_s
        queue_ms = (admitted - submitted) * 1e3 if admitted is not None else 0.0
        first = request.first_token_s
        if first is None:
            return Timings(queue_ms, None, None)
        ttft_ms = (first - submitted) * 1e3
        last = request.finished_s
        tpot_ms = (last - first) * 1e3 / (new_tokens - 1) if last is not None and new_tokens > 1 else None
        return Timings(queue_ms, ttft_ms, tpot_ms)


def _seconds(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or math.isnan(timeout):
        raise RequestRejected(f"timeout is {timeout!r}, expected seconds, or None")
    return float(timeout) if timeout <= threading.TIMEOUT_MAX else None


class TokenReader:
    """Turns what a step produced into streamed tokens, decoding on the reader's thread.

    Args:
        decoder: a decoder of the reader's own; None where there is no tokenizer, or where the step decodes.
    """

    def __init__(self, decoder: StreamDecoder | None) -> None:
        self._decoder = decoder
        self._flushed = False

    def read(self, produced: Produced) -> Token:
        """The streamed form of `produced`."""
        text = produced.piece or ""
        if produced.piece is None and self._decoder is not None:
            # the end token that ended the request is no text; a token cut off by length is
            if produced.finish_reason != "stop":
                text = self._decoder.push(produced.token_id)
            if produced.finish_reason is not None:
                text += self.rest()
        return Token(produced.token_id, text, produced.logprob, produced.finish_reason)

    def rest(self) -> str:
        """Text that was withheld, once."""
        if self._decoder is None or self._flushed:
            return ""
        self._flushed = True
        return self._decoder.finish()
