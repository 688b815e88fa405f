"""The scheduler: requests come and go, steps are planned, and what a step did is taken into account.

Counts only; the engine carries the plans out.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trivet.caches.pages import PagePool
from trivet.caches.prefix import PrefixCache
from trivet.caches.slots import SlotPool
from trivet.caches.state import StateCut
from trivet.capacity import Limits
from trivet.errors import AccountingError, ConfigError
from trivet.scheduler.admission import AdmissionGate
from trivet.scheduler.bounds import check_grid
from trivet.scheduler.holdings import Holdings
from trivet.scheduler.plan import Ending, SavePoint, StepPlan
from trivet.scheduler.request import FinishReason, Request, Status
from trivet.scheduler.rows import RunningRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger("trivet.scheduler")

NO_ENDINGS: Mapping[Request, Ending] = {}


class Scheduler:
    """First come, first served, over pages and slots that are reserved for each request's whole lifetime.

    Waiting requests are admitted in order of arrival while the step has tokens to spare, a slot is free and their
    lifetime fits; none overtakes another. `RunningRows` says which running rows a step serves. While
    ``max_step_tokens`` is at least ``max_requests``, every running row advances in every step, and at most one row is
    partly prefilled at a time, apart from rows that stopped at a snapshot boundary, and from rows that wait on a grid.
    In general a row advances within
    `trivet.scheduler.bounds.progress_bound_steps`, and any queue is drained within `drain_bound_steps`.

    `schedule` advances what is scheduled, `complete` what is computed, so that a step can be scheduled by count while
    the one before it is in flight. Steps complete (or fail) in the order in which they were scheduled.

    `prepare` is called by any thread, everything else by one at a time: the engine holds its lock meanwhile.

    Args:
        limits: what the operator allows: the very object that sized the plans.
        pool: the KV pages.
        slots: request slots, at most ``max_requests``.
        prefix: the prefix cache over `pool`, or None to serve without one.
        recurrent: whether the model has recurrent layers, so that slots are cleared or restored before first use.
        chunked_prefill: whether a prompt may be computed in pieces.
        mixed_steps: whether a step may have prefill and decode rows at once.
        cuts_inside: whether the model's layers save snapshots inside a piece of a prompt; pieces end there otherwise.
        grid_tokens: pieces of prompts end at multiples of this, or with the prompt. Above 1, what a prompt leaves must
            not depend on how it was computed, so that nothing of new tokens is offered to others either: a recurrent
            state has other bits after decode steps than after the same tokens as a prompt.
        clock: seconds, monotonic.

    Attributes:
        gate: the one gate that every request passes, also to be asked at the call (`AdmissionGate.check`).

    Raises:
        ConfigError: the parts do not fit each other.
    """

    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        slots: SlotPool,
        *,
        prefix: PrefixCache | None = None,
        recurrent: bool = False,
        chunked_prefill: bool = True,
        mixed_steps: bool = True,
        cuts_inside: bool = False,
        grid_tokens: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_parts(limits, slots, prefix, recurrent, chunked_prefill or cuts_inside)
        check_grid(limits, prefix.grain_tokens if prefix is not None else grid_tokens, grid_tokens)
        self.limits = limits
        self.gate = AdmissionGate(limits, pool.total, chunked_prefill=chunked_prefill)
        self._holdings = Holdings(self.gate, pool, slots, prefix, prompts_alone=grid_tokens > 1)
        self._rows = RunningRows(
            limits,
            chunked_prefill=chunked_prefill,
            mixed_steps=mixed_steps,
            stops_for_snapshots=not cuts_inside,
            grid_tokens=grid_tokens,
        )
        self._recurrent = recurrent
        self._clock = clock
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._running: dict[Request, None] = {}  # whoever holds a slot and pages, in order of admission
        self._given_up: list[Request] = []
        self._scheduled_steps = 0
        self._closed_steps = 0
        self._submitted = 0
        self._admitted = 0
        self._ended: dict[FinishReason, int] = {"stop": 0, "length": 0, "cancelled": 0, "error": 0}

    # Requests come and go.

    def prepare(self, request: Request) -> None:
        """Check `request` and digest its prompt, off the serving thread if wanted; `submit` does it otherwise.

        Raises:
            RequestRejected: it could never be served. Nothing was changed.
        """
        self._holdings.prepare(request)

    def submit(self, request: Request) -> None:
        """Queue `request` behind all others.

        Raises:
            RequestRejected: it could never be served. Nothing was changed.
        """
        if request.status is not Status.WAITING or request in self._waiting:
            raise AccountingError(f"{request!r} was submitted before, or has ended")
        if not request.lifetime_pages:
            self.prepare(request)
        request.submitted_s = self._clock()
        self._waiting[request] = None
        self._submitted += 1

    def withdraw(self, request: Request) -> None:
        """Undo `submit`, or what an interrupt left of it."""
        if request in self._waiting:
            del self._waiting[request]
            self._submitted -= 1

    def cancel(self, request: Request) -> bool:
        """End `request` as ``"cancelled"``, in any state; False if it had ended already. See `end`."""
        return self.end(request, "cancelled")

    def end(self, request: Request, reason: FinishReason, error: BaseException | None = None) -> bool:
        """End `request` now, in any state; False if it had ended already.

        Its tokens no longer change. Its pages and slot are back at once or, while a step with a row of it is in
        flight, when that step completes or fails.
        """
        if request.status is Status.FINISHED:
            return False
        self._waiting.pop(request, None)
        self._end(request, reason, error, self._clock())
        return True

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or holds pages."""
        return bool(self._waiting or self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests that hold nothing yet, in order of arrival."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold a slot and pages, in order of admission."""
        return tuple(self._running)

    def counters(self) -> dict[str, int]:
        """What ``Runtime.stats()`` tells of scheduling and caches. Free, cached and held pages add up to the total."""
        held = self._holdings
        shelf = held.shelf
        cached = held.cached_pages
        return {
            "steps": self._scheduled_steps,
            "requests_running": sum(request.status is Status.RUNNING for request in self._running),
            "requests_waiting": len(self._waiting),
            "requests_submitted": self._submitted,
            "requests_admitted": self._admitted,
            "requests_finished": sum(self._ended.values()),
            "requests_cancelled": self._ended["cancelled"],
            "requests_failed": self._ended["error"],
            "pages_total": held.pool.total,
            "pages_free": held.pool.free_count,
            "pages_cached": cached,
            "pages_held": held.pool.total - held.pool.free_count - cached,
            "pages_reserved": self.gate.reserved_pages,
            "slots_total": held.slots.total,
            "slots_free": held.slots.free_count,
            "snapshots_total": shelf.total if shelf is not None else 0,
            "snapshots_free": shelf.free_count if shelf is not None else 0,
            "prefix_hit_tokens": held.prefix_hit_tokens,
            "prefix_prompt_tokens": held.prefix_prompt_tokens,
            "prefix_grain_tokens": held.grain_tokens,
        }

    # A step is planned.

    def schedule(self) -> StepPlan | None:
        """Admit what fits and plan the next step; None if there is nothing to compute now.

        A request for which an allocator raises ends with that error, before anything of it has advanced; the others
        go on. `AccountingError` gets out: the accounts themselves are wrong.
        """
        if self._waiting:
            self._admit_waiting()
        decode, prefill = self._rows.select()
        if not decode and not prefill:
            return None
        return self._issue(decode, prefill)

    def _admit_waiting(self) -> None:
        spare = self._rows.spare_tokens()
        while self._waiting and (spare > 0 or self._rows.queue_for_turns):
            head = next(iter(self._waiting))
            try:
                if not self._holdings.admit(head):
                    return
            except AccountingError:
                raise
            except Exception as error:  # of an allocator; nothing was given to `head`
                self._give_up(head, error)
                continue
            del self._waiting[head]
            head.status = Status.RUNNING
            head.admitted_s = self._clock()
            self._running[head] = None
            self._rows.add(head)
            self._admitted += 1
            spare -= self._rows.piece_tokens(head)

    def _issue(self, decode: Sequence[Request], prefill: Sequence[tuple[Request, int]]) -> StepPlan | None:
        """Advance what is scheduled by the chosen rows, and write the step down; None if no row could be served.

        Everything that may fail for a row comes before anything of its request is advanced: a row for which an
        allocator raises is left out, and its request ends with the error.
        """
        held = self._holdings
        saving_grain = held.grain_tokens if held.shelf is not None else 0
        in_flight = self._scheduled_steps > self._closed_steps
        requests: list[Request] = []
        starts: list[int] = []
        lengths: list[int] = []
        carried: list[int] = []
        sampling: list[int] = []
        points: list[SavePoint] = []
        cuts: list[StateCut] = []
        saves: list[tuple[int, int]] = []
        exhausted: list[Request] = []

        for request in decode:
            start = request.scheduled_tokens
            end = start + 1
            row = len(requests)
            if start == request.page_room_tokens or (saving_grain and not end % saving_grain):
                try:
                    held.grow(request, end)
                    if saving_grain and not end % saving_grain:
                        planned = self._plan_saves(request, row, (end,))
                        points += planned
                        saves += [(request.slot, save.snapshot) for save in planned]
                except AccountingError:
                    raise
                except Exception as error:
                    self._give_up(request, error)
                    continue
            requests.append(request)
            starts.append(start)
            request.scheduled_tokens = end
            request.in_flight += 1
            if end == request.lifetime_tokens:
                exhausted.append(request)
            if in_flight and start >= len(request.tokens):
                carried.append(row)

        decode_rows = len(requests)
        sampling = list(range(decode_rows))
        lengths = [1] * decode_rows
        fresh: list[int] = []
        restores: list[tuple[int, int]] = []
        clears: list[int] = []
        for request, tokens in prefill:
            start = request.scheduled_tokens
            end = start + tokens
            row = len(requests)
            snapshot: int | None = None
            planned = []
            try:
                held.grow(request, end)
                if not request.started:
                    snapshot = held.take_restore(request)
                if saving_grain:
                    wanted = [boundary for boundary in request.boundaries if boundary < end]
                    if not end % saving_grain:
                        wanted.append(end)
                    planned = self._plan_saves(request, row, wanted)
            except AccountingError:
                raise
            except Exception as error:
                self._give_up(request, error)
                continue
            requests.append(request)
            starts.append(start)
            lengths.append(tokens)
            points += planned
            for save in planned:
                if save.boundary_tokens < end:
                    cuts.append(StateCut(row, save.boundary_tokens - start, save.snapshot))
                else:
                    saves.append((request.slot, save.snapshot))
            request.scheduled_tokens = end
            request.in_flight += 1
            if not request.started:
                request.started = True
                fresh.append(row)
                if snapshot is not None:
                    restores.append((snapshot, request.slot))
                elif self._recurrent:
                    clears.append(request.slot)
            if end == request.prompt_tokens:
                if request.kind == "generate":
                    sampling.append(row)
                if end == request.lifetime_tokens:
                    exhausted.append(request)
                else:
                    self._rows.start_decoding(request)

        if not requests:
            return None
        for request in exhausted:
            self._rows.remove(request)
        plan = StepPlan(
            serial=self._scheduled_steps,
            requests=tuple(requests),
            starts=tuple(starts),
            lengths=tuple(lengths),
            decode_rows=decode_rows,
            sampling_rows=tuple(sampling),
            carried_rows=tuple(carried),
            fresh_rows=tuple(fresh),
            restores=tuple(restores),
            clears=tuple(clears),
            cuts=tuple(cuts),
            saves=tuple(saves),
            save_points=tuple(points),
            page_size=held.page_size,
        )
        self._scheduled_steps += 1
        return plan

    def _plan_saves(self, request: Request, row: int, boundaries: Sequence[int]) -> list[SavePoint]:
        """The snapshots to save at `boundaries`, as far as they are wanted; none if planning one of them raises.

        What one step saves makes no room for the rest of it: the boundary that a rerun of the prompt hits comes first.
        """
        planned: list[SavePoint] = []
        inside = [boundary for boundary in boundaries if boundary < request.prompt_tokens]
        behind = [boundary for boundary in boundaries if boundary >= request.prompt_tokens]
        try:
            for boundary_tokens in (*reversed(inside), *behind):
                save = self._holdings.plan_save(request, row, boundary_tokens)
                if save is not None:
                    planned.append(save)
        except Exception:
            self._holdings.drop_saves(planned)
            raise
        return sorted(planned, key=lambda save: save.boundary_tokens)

    def _give_up(self, request: Request, error: BaseException) -> None:
        """End a request for which an allocator raised."""
        self.end(request, "error", error)
        self._given_up.append(request)

    def take_given_up(self) -> list[Request]:
        """The requests that `schedule` has ended since this was last called."""
        given_up, self._given_up = self._given_up, []
        return given_up

    # A step has run.

    def complete(
        self,
        plan: StepPlan,
        token_ids: Sequence[int] | NDArray[np.int32] | NDArray[np.int64],
        endings: Mapping[Request, Ending] = NO_ENDINGS,
    ) -> list[Request]:
        """Take a step that has run into account: accept its tokens, publish full pages, end what is done.

        Requests that ended while the step was in flight get nothing of it, and what they held is released.

        Args:
            plan: the oldest step in flight.
            token_ids: the new token of each of ``plan.sampling_rows``.
            endings: requests of the plan that end by it, though not by length. ``"stop"`` on the last allowed token
                is a stop.

        Returns:
            Requests that this call ended, in the order of the plan's rows.
        """
        new_tokens = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        if len(new_tokens) != len(plan.sampling_rows):
            raise AccountingError(
                f"step {plan.serial}: {len(new_tokens)} new tokens for {len(plan.sampling_rows)} sampling rows"
            )
        self._close_step(plan)
        now = self._clock()
        advance = self._advance
        decode = plan.decode_rows
        ended = [
            (request, ending)
            for request, start, token in zip(plan.requests[:decode], plan.starts, new_tokens, strict=False)
            if (ending := advance(request, start + 1, token, endings)) is not None
        ]
        sampled = dict(zip(plan.sampling_rows[decode:], new_tokens[decode:], strict=True))
        for row in range(decode, len(plan.requests)):
            request, token = plan.requests[row], sampled.get(row)
            ending = advance(request, plan.starts[row] + plan.lengths[row], token, endings)
            if ending is not None:
                ended.append((request, ending))
            if request.new_tokens == 1:
                request.first_token_s = now

        unusable = {request for request, ending in ended if ending.reason == "error"}
        for save in plan.save_points:
            request = plan.requests[save.row]
            if request.status is Status.RUNNING and request not in unusable and self._holdings.publishes(request):
                self._attach(request, save)
            else:
                self._holdings.drop_saves((save,))
        for request in unusable:
            self._holdings.retract(request)
        for request, ending in ended:
            self._end(request, ending.reason, ending.error, now)
        self._release_late(plan)
        return [request for request, _ in ended]

    def fail(self, plan: StepPlan, error: BaseException) -> list[Request]:
        """End the requests of a step that did not run to its end; all others go on.

        Nothing of the step is published. Pages and slots are back, those of a request with a row in a later step that
        is in flight when that step has completed or failed.

        Args:
            plan: the oldest step in flight.
            error: what the requests end with.

        Returns:
            Requests that this call ended.
        """
        self._close_step(plan)
        now = self._clock()
        self._holdings.drop_saves(plan.save_points)
        ended = []
        for request in plan.requests:
            request.in_flight -= 1
            if request.status is Status.RUNNING:
                self._end(request, "error", error, now)
                ended.append(request)
        self._release_late(plan)
        return ended

    def _advance(
        self, request: Request, computed_tokens: int, token: int | None, endings: Mapping[Request, Ending]
    ) -> Ending | None:
        """Take one row into account; how its request ends by it, if it does."""
        request.in_flight -= 1
        if request.status is not Status.RUNNING:
            return None
        ending = endings.get(request) if endings else None
        if ending is not None and ending.reason == "error":
            return ending
        request.computed_tokens = computed_tokens
        if token is not None:
            request.tokens.append(token)
        if computed_tokens >= request.publish_at_tokens:
            try:
                self._holdings.publish(request)
            except AccountingError:
                raise
            except Exception as error:  # the request is whole, only nobody will find more of it
                self._holdings.stop_publishing(request)
                logger.warning("request %d is no longer offered to others: %s", request.id, error)
        if ending is None and computed_tokens == request.lifetime_tokens:
            return Ending("length")
        return ending

    def _attach(self, request: Request, save: SavePoint) -> None:
        """Make a snapshot findable; one that cannot be costs a hit, and nothing else."""
        try:
            self._holdings.attach_save(request, save)
        except AccountingError:
            raise
        except Exception as error:
            self._holdings.drop_saves((save,))
            logger.warning("request %d: a snapshot is not offered to others: %s", request.id, error)

    def _close_step(self, plan: StepPlan) -> None:
        if plan.serial != self._closed_steps or plan.serial >= self._scheduled_steps:
            raise AccountingError(
                f"step {plan.serial} is closed out of turn: the oldest step in flight is {self._closed_steps}, "
                f"{self._scheduled_steps} were scheduled"
            )
        self._closed_steps += 1

    def _release_late(self, plan: StepPlan) -> None:
        """Release requests of a closed step that had ended while it was in flight."""
        for request in plan.requests:
            if request.status is Status.FINISHED and request in self._running and not request.in_flight:
                self._release(request)

    def _end(self, request: Request, reason: FinishReason, error: BaseException | None, now: float) -> None:
        """Mark `request` as ended, and release what it holds unless a step with a row of it is in flight."""
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.error = error
        request.finished_s = now
        if request.submitted_s is not None:
            self._ended[reason] += 1
        self._rows.remove(request)
        if not request.in_flight:
            self._release(request)

    def _release(self, request: Request) -> None:
        if request in self._running:
            del self._running[request]
            self._holdings.release(request)


def _check_parts(
    limits: Limits, slots: SlotPool, prefix: PrefixCache | None, recurrent: bool, saves_inside_prompts: bool
) -> None:
    if slots.total > limits.max_requests:
        raise ConfigError(f"{slots.total} request slots are more than max_requests ({limits.max_requests})")
    if prefix is None:
        return
    if prefix.page_size != limits.page_size:
        raise ConfigError(f"the prefix cache has pages of {prefix.page_size} tokens, the limits of {limits.page_size}")
    if recurrent and prefix.snapshots is None:
        raise ConfigError("a model with recurrent layers needs snapshots beside the pages of its prefix cache")
    if prefix.snapshots is not None and prefix.snapshots.total and not saves_inside_prompts:
        raise ConfigError(
            "prefill stops at snapshot boundaries, and this model computes prompts whole: serve it with "
            "prefix_cache=False"
        )
