"""The text of one request's new tokens, streamed."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.text.increments import increments
from trivet.text.stops import StopScanner
from trivet.text.tokenizer import Tokenizer


class StreamDecoder:
    """Turns tokens into text as they come; one per request, used by one thread at a time.

    What `push` and `finish` return, put together, is ``tokenizer.decode`` of the tokens pushed, cut where the first
    stop string begins. Text is withheld while it could still become a character or a stop string. It knows nothing
    of the prompt. An end token is not text: end with `finish` without pushing it.

    Args:
        tokenizer: the checkpoint's.
        stops: texts that end the request, none of them empty.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._increments = increments(tokenizer)
        self._scanner = StopScanner(stops)
        self._finished = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete. Ask after `finish` too, which may complete one."""
        return self._scanner.stop is not None

    @property
    def stop(self) -> str | None:
        """The stop string that was met (see `StopScanner` for which, if several were)."""
        return self._scanner.stop

    def push(self, token_id: int) -> str:
        """Take the next new token; return the text that has become certain, "" once stopped or finished."""
        if self._finished or self.stopped:
            return ""
        return self._scanner.feed(self._increments.push(token_id))

    def finish(self) -> str:
        """Return the text that was withheld, no token being expected any more; "" if called again."""
        if self._finished or self.stopped:
            self._finished = True
            return ""
        self._finished = True
        return self._scanner.feed(self._increments.finish()) + self._scanner.flush()
