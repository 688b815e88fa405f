"""Which of the running rows the next step serves, and with how many tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from trivet.capacity import Limits
from trivet.scheduler.request import Request


class RunningRows:
    """Running requests with tokens left to schedule, and the policy over them.

    A step of at most ``max_step_tokens`` (T) tokens gives one token to every decode row, and what is left to
    prefilling rows, oldest first, each leaving one token to every later one. With more rows than T, the T least
    recently served ones get one token each.

    Where prompts are computed whole, or prefill and decode rows cannot share a step, rows are served by turns: the
    least recently served row comes first, and what does not go with it waits for the next step.
    `trivet.scheduler.bounds.progress_bound_steps` states what follows.

    On a grid, prompts are cut at its multiples alone. A prefilling row for which not even one of them is in reach waits
    until older ones are done; the oldest never does.

    Args:
        limits: what the operator allows.
        chunked_prefill: whether a prompt may be computed in pieces.
        mixed_steps: whether a step may have prefill and decode rows at once.
        stops_for_snapshots: whether a piece ends where a snapshot is wanted.
        grid_tokens: pieces end at multiples of this, or with the prompt.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        chunked_prefill: bool,
        mixed_steps: bool,
        stops_for_snapshots: bool = True,
        grid_tokens: int = 1,
    ) -> None:
        self._step_tokens = limits.max_step_tokens
        self._queue_for_turns = limits.max_step_tokens < limits.max_requests
        self._chunked = chunked_prefill
        self._mixed = mixed_steps
        self._stops_for_snapshots = stops_for_snapshots
        self._grid_tokens = grid_tokens
        self._prefilling: dict[Request, None] = {}
        self._decoding: dict[Request, None] = {}
        self._turns: OrderedDict[Request, None] = OrderedDict()  # both, least recently served first

    def add(self, request: Request) -> None:
        """Enter an admitted request, behind all others."""
        self._prefilling[request] = None
        self._turns[request] = None

    def start_decoding(self, request: Request) -> None:
        """Note that the whole prompt of `request` is scheduled."""
        del self._prefilling[request]
        self._decoding[request] = None

    def remove(self, request: Request) -> None:
        """Note that `request` has nothing left to schedule. Does nothing if that is known."""
        self._prefilling.pop(request, None)
        self._decoding.pop(request, None)
        self._turns.pop(request, None)

    @property
    def queue_for_turns(self) -> bool:
        """Whether requests join without room in the next step: a step has fewer tokens than there may be rows."""
        return self._queue_for_turns

    def spare_tokens(self) -> int:
        """Prompt tokens that the next step has room for beside the rows that there are; may be negative.

        Decode rows are not counted where they do not share a step with prompts.
        """
        spare = self._step_tokens - sum(self.piece_tokens(request) for request in self._prefilling)
        return spare - len(self._decoding) if self._chunked and self._mixed else spare

    def select(self) -> tuple[Sequence[Request], Sequence[tuple[Request, int]]]:
        """Rows of the next step: decode rows with one token each, and prefill rows with the tokens that each gets."""
        budget = self._step_tokens
        if self._chunked and self._mixed and len(self._turns) <= budget:
            return tuple(self._decoding), self._share(budget - len(self._decoding))
        order = list(self._turns)
        if not order:
            return (), ()
        if not self._mixed:
            turn = order[0].prefilling
            order = [request for request in order if request.prefilling is turn]
        prefill: Sequence[tuple[Request, int]]
        if not self._chunked:
            decode, prefill = self._whole(order)
        elif len(order) > budget:
            decode = [request for request in order[:budget] if not request.prefilling]
            prefill = [(request, 1) for request in order[:budget] if request.prefilling]
        elif order[0].prefilling:
            decode, prefill = [], self._share(budget)
        else:
            decode, prefill = order, ()
        for request in decode:
            self._turns.move_to_end(request)
        for request, _ in prefill:
            self._turns.move_to_end(request)
        if self._grid_tokens > 1 and prefill:  # who waits on the grid does not keep decode rows waiting
            for request in self._prefilling:
                self._turns.move_to_end(request)
        return decode, prefill

    def _share(self, budget: int) -> list[tuple[Request, int]]:
        """Divide `budget`, which is at least one token for each, over the prefilling rows."""
        if self._grid_tokens > 1:
            return self._share_on_grid(budget)
        pieces = []
        later = len(self._prefilling)
        for request in self._prefilling:
            later -= 1
            tokens = min(self.piece_tokens(request), budget - later)
            budget -= tokens
            pieces.append((request, tokens))
        return pieces

    def _share_on_grid(self, budget: int) -> list[tuple[Request, int]]:
        """Give `budget` to the oldest prefilling rows, each as far as its prompt or the grid lets it come."""
        pieces = []
        for request in self._prefilling:
            tokens = self.piece_tokens(request)
            if tokens > budget:
                start = request.scheduled_tokens
                tokens = (start + budget) // self._grid_tokens * self._grid_tokens - start
            if tokens > 0:
                budget -= tokens
                pieces.append((request, tokens))
        return pieces

    def _whole(self, order: Iterable[Request]) -> tuple[list[Request], list[tuple[Request, int]]]:
        """Serve rows in `order`, prompts whole. A prompt that does not fit comes first in a later step."""
        budget = self._step_tokens
        decode: list[Request] = []
        prefill: list[tuple[Request, int]] = []
        for request in order:
            tokens = self.piece_tokens(request) if request.prefilling else 1
            if tokens > budget:
                continue
            budget -= tokens
            if request.prefilling:
                prefill.append((request, tokens))
            else:
                decode.append(request)
        return decode, prefill

    def piece_tokens(self, request: Request) -> int:
        """Tokens of the prompt up to where its prefill next stops."""
        stops = self._stops_for_snapshots and request.boundaries
        return (request.boundaries[0] if stops else request.prompt_tokens) - request.scheduled_tokens
