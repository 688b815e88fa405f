"""What a request has produced so far, handed from the step to whoever waits for it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import NamedTuple

from trivet.errors import StepFailed, TrivetError
from trivet.sampling.logprobs import TokenLogprob
from trivet.text.detokenizer import StreamDecoder


def as_raised(error: BaseException) -> TrivetError:
    """`error`, which ended a request, for one of its readers to raise.

    A new one each time: an exception that many readers raise gathers the frames of all, and with them what they hold.
    """
    if isinstance(error, TrivetError):
        raised = copy.copy(error)
    else:
        raised = StepFailed(f"the step that computed this request raised {type(error).__name__}: {error}")
    raised.__cause__ = error
    return raised


class Produced(NamedTuple):
    """One new token as the step hands it over.

    Attributes:
        token_id: its id.
        logprob: its log-probability if asked for.
        piece: text that became certain, where the step decodes (stop strings); None where the reader decodes.
        finish_reason: None except on the last token.
    """

    token_id: int
    logprob: TokenLogprob | None
    piece: str | None
    finish_reason: str | None


class RequestOutput:
    """Tokens and end of one request: written by the thread that steps, read by any.

    Attributes:
        stop_decoder: decodes within the step when stop strings must be seen; None leaves decoding to readers.
        score_top: alternatives to report at each position of a scored prompt.
        score: log-probabilities of a scored prompt.
        withheld: text that the step kept back when the request was cancelled or failed.
    """

    __slots__ = (
        "__weakref__",
        "_changed",
        "_listener",
        "_produced",
        "_waiting",
        "error",
        "finish_reason",
        "score",
        "score_top",
        "stop_decoder",
        "withheld",
    )

    def __init__(
        self,
        stop_decoder: StreamDecoder | None = None,
        *,
        score_top: int = 0,
        listener: Callable[[], None] | None = None,
    ) -> None:
        self.stop_decoder = stop_decoder
        self.score_top = score_top
        self.score: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.withheld = ""
        # A token with nothing to it is kept as its bare id. One object for each token, of a sort that the garbage
        # collector looks through, would have it scan every token of every open request, over and over.
        self._produced: list[int | Produced] = []
        self._listener = listener
        self._changed = threading.Condition()
        self._waiting = 0

    @property
    def done(self) -> bool:
        """Whether the request has ended; nothing changes afterwards."""
        return self.finish_reason is not None

    @property
    def count(self) -> int:
        """New tokens so far."""
        return len(self._produced)

    def entry(self, index: int) -> Produced:
        """New token `index`, which is there."""
        produced = self._produced[index]
        return produced if isinstance(produced, Produced) else Produced(produced, None, None, None)

    def entries(self) -> list[Produced]:
        """The new tokens so far."""
        return [self.entry(index) for index in range(self.count)]

    def put(
        self, token_id: int, logprob: TokenLogprob | None = None, piece: str | None = None, reason: str | None = None
    ) -> None:
        """Hand over a token, as `Produced` describes it.

        Takes no lock unless somebody waits: most requests are read when they have ended.
        """
        bare = logprob is None and piece is None and reason is None
        self._produced.append(token_id if bare else Produced(token_id, logprob, piece, reason))
        if self._waiting:
            with self._changed:
                self._changed.notify_all()
        if self._listener is not None:
            self._listener()

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """End the request. The first end stands."""
        with self._changed:
            if self.finish_reason is None:
                if reason in ("cancelled", "error"):
                    self.withheld = self._withheld()
                self.error = error
                self.finish_reason = reason
            self._changed.notify_all()
        if self._listener is not None:
            self._listener()

    def _withheld(self) -> str:
        """Text of the tokens given that waited for a stop string to go on."""
        if self.stop_decoder is None or self.stop_decoder.stopped:
            return ""
        try:
            return self.stop_decoder.finish()
        except Exception:  # it may be what ends the request
            return ""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the request has ended; False if `timeout` seconds passed before."""
        with self._changed:
            return self._changed.wait_for(lambda: self.done, timeout)

    def wait_for_token(self, index: int, timeout: float | None = None) -> bool:
        """Wait until token `index` is there or the request has ended; False if `timeout` seconds passed before."""
        with self._changed:
            self._waiting += 1  # before looking, so that a token that comes after the look is announced
            try:
                return self._changed.wait_for(lambda: self.count > index or self.done, timeout)
            finally:
                self._waiting -= 1
