"""One request, from submission to its last token. Owned by the scheduler; others read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Literal

import numpy as np

from trivet.caches.node import PrefixNode
from trivet.errors import RequestRejected

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trivet.sampling.params import Sampling

Kind = Literal["generate", "score"]
FinishReason = Literal["stop", "length", "cancelled", "error"]

NO_SLOT = -1
"""Stands for a slot where a request holds none."""

NEVER_TOKENS = 2**62
"""More tokens than any context has."""


class Status(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    """It holds nothing yet."""
    RUNNING = "running"
    """It is admitted: it holds a slot and pages, and its whole lifetime is reserved."""
    FINISHED = "finished"
    """It is done, and its tokens no longer change. While a step with a row of it is in flight it still holds pages."""


class Request:
    """A prompt and what has become of it. Compared by identity.

    Args:
        id: name in logs; unique among the requests of a runtime.
        prompt: token ids, at least one.
        max_new_tokens: most new tokens, as `AdmissionGate.check` resolved them; 0 for ``"score"``.
        kind: ``"generate"`` for new tokens, ``"score"`` for the log-probabilities of the prompt.
        sampling: how new tokens are drawn; not looked at by the scheduler.

    Attributes:
        tokens: int32, the prompt and the new tokens that were accepted.
        prompt_tokens: tokens of the prompt.
        lifetime_tokens: tokens whose keys and values are ever computed: all but the last new one.
        computed_tokens: tokens whose keys and values exist, cached ones included.
        scheduled_tokens: `computed_tokens` once every step in flight is completed.
        cached_tokens: prompt tokens that came from the prefix cache.
        pages: pages of the context in order, enough for `scheduled_tokens`.
        slot: the request's sampling row and recurrent state slot; -1 without one.
        reserved_pages: pages that it may still take.
        status, finish_reason, error: how far it is and how it ended. A ``"score"`` that ends well ends by
            ``"length"``.
        submitted_s, admitted_s, first_token_s, finished_s: when, on the scheduler's monotonic clock.
    """

    __slots__ = (
        "admitted_s",
        "boundaries",
        "cached_tokens",
        "computed_tokens",
        "digests",
        "duplicates",
        "error",
        "finish_reason",
        "finished_s",
        "first_token_s",
        "id",
        "in_flight",
        "kind",
        "lifetime_pages",
        "lifetime_tokens",
        "max_new_tokens",
        "node",
        "page_room_tokens",
        "pages",
        "prompt_tokens",
        "publish_at_tokens",
        "published_pages",
        "reserved_pages",
        "restore_from",
        "sampling",
        "scheduled_tokens",
        "slot",
        "started",
        "status",
        "submitted_s",
        "tokens",
        "trail_node",
    )

    def __init__(
        self,
        id: int,
        prompt: Sequence[int] | NDArray[np.int32],
        max_new_tokens: int,
        *,
        kind: Kind = "generate",
        sampling: Sampling | None = None,
    ) -> None:
        self.id = id
        self.kind: Kind = kind
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.tokens = _token_array(prompt)
        self.prompt_tokens = len(self.tokens)
        self.lifetime_tokens = lifetime_tokens(self.prompt_tokens, max_new_tokens)
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.submitted_s: float | None = None
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.computed_tokens = 0
        self.scheduled_tokens = 0
        self.cached_tokens = 0
        self.slot = NO_SLOT
        self.reserved_pages = 0
        self.pages: array[int] = array("i")

        # The scheduler's own notes.
        self.lifetime_pages = 0
        self.page_room_tokens = 0  # tokens that fit the pages it has
        self.in_flight = 0  # steps in flight with a row of it
        self.started = False  # whether a step with its first row was issued
        self.digests: list[bytes] = []  # of its full pages, as far as known
        self.node: PrefixNode | None = None  # end of its chain in the prefix cache, pinned
        self.published_pages = 0  # leading pages that the chain covers
        self.publish_at_tokens = NEVER_TOKENS  # computed tokens at which the next page is full
        self.duplicates: list[int] = []  # published pages whose content another request had published before
        self.boundaries: list[int] = []  # inside its prompt, where snapshots are still wanted, ascending
        self.restore_from: PrefixNode | None = None  # node with the snapshot that its first step restores
        self.trail_node: PrefixNode | None = None  # node with its latest decode-time snapshot

    @property
    def new_tokens(self) -> int:
        """How many new tokens were accepted."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """The new tokens that were accepted."""
        return tuple(self.tokens[self.prompt_tokens :])

    @property
    def prefilling(self) -> bool:
        """Whether some of the prompt is still to be scheduled."""
        return self.scheduled_tokens < self.prompt_tokens

    @property
    def done(self) -> bool:
        """Whether it has ended, however."""
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request(id={self.id}, {self.kind}, {self.status.value}, prompt_tokens={self.prompt_tokens}, "
            f"max_new_tokens={self.max_new_tokens}, computed_tokens={self.computed_tokens})"
        )


def lifetime_tokens(prompt_tokens: int, max_new_tokens: int) -> int:
    """Tokens whose keys and values a request ever needs: the last new token is never computed on."""
    return prompt_tokens + max(max_new_tokens, 1) - 1


def _token_array(prompt: Sequence[int] | NDArray[np.int32]) -> array[int]:
    try:
        ids = np.asarray(prompt, dtype=np.int32)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestRejected(f"prompt: expected a sequence of token ids that fit int32, {error}") from error
    if ids.ndim != 1:
        raise RequestRejected(f"prompt: found an array of shape {ids.shape}, expected a sequence of token ids")
    return array("i", ids.tobytes())
