"""What one step computes, for the engine to carry out. Host data only."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from attrs import frozen

from trivet.attention import StepBatch
from trivet.caches.state import StateCut
from trivet.scheduler.request import FinishReason, Request

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Row(NamedTuple):
    """One row of a step.

    Attributes:
        request: whose row it is.
        start: position of its first token.
        tokens: tokens that it computes.
        kind: ``"decode"`` or ``"prefill"``; a prefill piece may be one token long.
        samples: whether the logits of its last token give a new token.
    """

    request: Request
    start: int
    tokens: int
    kind: Literal["decode", "prefill"]
    samples: bool


class SavePoint(NamedTuple):
    """A snapshot that a step saves, and where it will be found once the step has completed.

    Attributes:
        row: row whose state is saved.
        snapshot: id to save into.
        boundary_tokens: tokens that the state covers then: a multiple of the prefix cache's grain.
        trailing: whether the request gives it up for the next one that it passes.
    """

    row: int
    snapshot: int
    boundary_tokens: int
    trailing: bool


class Ending(NamedTuple):
    """How a step ends a request, as the engine sees it.

    Attributes:
        reason: ``"stop"``: the row's token is accepted and is the last. ``"error"``: the row is unusable, its token is
            not accepted, and nothing of its chain is offered to other requests any more.
        error: the cause of ``"error"``.
    """

    reason: FinishReason
    error: BaseException | None = None


@frozen(eq=False)
class StepPlan:
    """The rows of a step, decode rows first, and what happens to recurrent state around the forward.

    The engine's order is: restores, clears, forward with its cuts, saves. A snapshot may be restored from and saved
    over in the same step. Arrays are made on first use, so they are to be made before the scheduler is asked for
    another step.

    Attributes:
        serial: number of the step, from 0.
        requests: the request of each row.
        starts: position of each row's first token.
        lengths: tokens that each row computes.
        decode_rows: how many leading rows are decode rows.
        sampling_rows: rows whose last token gives a new token, ascending; `Scheduler.complete` takes the new tokens
            in this order.
        carried_rows: decode rows whose input token is the one that the previous step samples, and which
            `token_ids` holds as 0. Empty unless a step is scheduled while another is in flight.
        fresh_rows: rows that are the first of their request.
        restores: ``(snapshot, slot)`` to copy into slots before the forward.
        clears: slots whose recurrent state starts from zero; empty without recurrent layers.
        cuts: snapshots that the forward itself saves, of states inside a row; ascending by row and tokens.
        saves: ``(slot, snapshot)`` to copy out of slots after the forward.
        save_points: where the snapshots of both will be found.
        page_size: tokens per page.
    """

    serial: int
    requests: tuple[Request, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    decode_rows: int
    sampling_rows: tuple[int, ...]
    carried_rows: tuple[int, ...]
    fresh_rows: tuple[int, ...]
    restores: tuple[tuple[int, int], ...]
    clears: tuple[int, ...]
    cuts: tuple[StateCut, ...]
    saves: tuple[tuple[int, int], ...]
    save_points: tuple[SavePoint, ...]
    page_size: int

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows one by one, for tests and reports; the hot path reads the columns."""
        sampling = set(self.sampling_rows)
        return tuple(
            Row(request, start, tokens, "decode" if row < self.decode_rows else "prefill", row in sampling)
            for row, (request, start, tokens) in enumerate(zip(self.requests, self.starts, self.lengths, strict=True))
        )

    @property
    def decode_tokens(self) -> int:
        """Tokens of the decode rows, one each."""
        return self.decode_rows

    @property
    def prefill_tokens(self) -> int:
        """Tokens of the prefill rows."""
        return sum(self.lengths[self.decode_rows :])

    @property
    def path(self) -> Literal["decode", "prefill", "mixed"]:
        """Which kinds of rows the step has."""
        if self.decode_rows == len(self.requests):
            return "decode"
        return "mixed" if self.decode_rows else "prefill"

    @property
    def scores(self) -> bool:
        """Whether any row is of a request whose every position is scored."""
        return any(request.kind == "score" for request in self.requests[self.decode_rows :])

    @cached_property
    def sampled_tokens(self) -> NDArray[np.int64]:
        """int64: the last token of each of `sampling_rows`, among the step's tokens."""
        return np.cumsum(self.query_lengths, dtype=np.int64)[list(self.sampling_rows)] - 1

    @cached_property
    def query_lengths(self) -> NDArray[np.int32]:
        """int32 ``[rows]``: tokens that each row computes."""
        return np.array(self.lengths, dtype=np.int32)

    @cached_property
    def kv_lengths(self) -> NDArray[np.int32]:
        """int32 ``[rows]``: tokens of each row's context once the step has appended."""
        return np.array(self.starts, dtype=np.int32) + self.query_lengths

    @cached_property
    def page_indptr(self) -> NDArray[np.int32]:
        """int32 ``[rows + 1]``: where each row's pages start in `page_indices`."""
        indptr = np.zeros(len(self.requests) + 1, dtype=np.int32)
        np.cumsum(-(-self.kv_lengths // self.page_size), out=indptr[1:])
        return indptr

    @cached_property
    def page_indices(self) -> NDArray[np.int32]:
        """int32: the pages of all rows, row by row."""
        counts = np.diff(self.page_indptr).tolist()
        pages = [
            request.pages if len(request.pages) == count else request.pages[:count]
            for request, count in zip(self.requests, counts, strict=True)
        ]
        return np.frombuffer(bytearray().join(pages), dtype=np.int32)

    @cached_property
    def slots(self) -> NDArray[np.int32]:
        """int32 ``[rows]``: slot of each row."""
        return np.array([request.slot for request in self.requests], dtype=np.int32)

    def batch(self, query_heads: int, kv_heads: int) -> StepBatch:
        """The step as a plan owner of that attention geometry takes it. The arrays are shared between batches."""
        return StepBatch(
            query_lengths=self.query_lengths,
            kv_lengths=self.kv_lengths,
            page_indptr=self.page_indptr,
            page_indices=self.page_indices,
            decode_rows=self.decode_rows,
            query_heads=query_heads,
            kv_heads=kv_heads,
        )

    def token_ids(self) -> NDArray[np.int32]:
        """int32 ``[tokens]``: input token of each row and position, row by row; 0 for `carried_rows`."""
        decode = self.decode_rows
        if self.carried_rows:
            known = [
                request.tokens[start] if start < len(request.tokens) else 0
                for request, start in zip(self.requests[:decode], self.starts[:decode], strict=True)
            ]
        else:
            known = [
                request.tokens[start]
                for request, start in zip(self.requests[:decode], self.starts[:decode], strict=True)
            ]
        ids = np.array(known, dtype=np.int32)
        if decode == len(self.requests):
            return ids
        pieces = [
            request.tokens[start : start + tokens]
            for request, start, tokens in zip(
                self.requests[decode:], self.starts[decode:], self.lengths[decode:], strict=True
            )
        ]
        return np.concatenate((ids, np.frombuffer(bytearray().join(pieces), dtype=np.int32)))
