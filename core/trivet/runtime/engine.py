"""Carries out steps: what the scheduler planned, on the device, and back to the requests."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import TypeVar

import numpy as np
import torch
from attrs import evolve

from trivet.attention import PlanOwner
from trivet.caches.kv import KvCache
from trivet.caches.state import StatePool
from trivet.errors import AccountingError, PluginError, UnusableLogits
from trivet.geometry import AttentionGeometry
from trivet.layers.context import StepContext
from trivet.layers.decoder import DecoderModel
from trivet.layers.rotary import RotaryTable
from trivet.layout import Buffers
from trivet.ops.packed import PackedRows
from trivet.ops.transfer import to_device
from trivet.runtime.attempt import Attempt
from trivet.runtime.blueprint import Blueprint
from trivet.runtime.capture import CapturedPlans, GraphPool, Taken
from trivet.runtime.fault import lost_device, release_locals
from trivet.runtime.graphs import CAPTURED_ALTERNATIVES, Bucket, CapturedSamples, DecodeGraphs
from trivet.runtime.inputs import StepInputs
from trivet.runtime.launched import Launched, Results
from trivet.runtime.output import RequestOutput
from trivet.runtime.short_prompts import ShortPrompts, most_read_tokens
from trivet.runtime.step import StepReport
from trivet.sampling.batch import PLAIN, SampleGroups, SamplingBatch
from trivet.sampling.logprobs import TokenLogprob, token_logprobs
from trivet.sampling.sampler import HostSamples, SampleResult, sample
from trivet.sampling.seeds import derive_seed
from trivet.scheduler.plan import Ending, StepPlan
from trivet.scheduler.request import Request, Status
from trivet.scheduler.scheduler import Scheduler

logger = logging.getLogger("trivet.engine")

NO_OUTPUTS = np.zeros(1, dtype=np.int64)

Result = TypeVar("Result")

GREEDY, DRAWN, FULL = "greedy", "drawn", "full"
"""Kinds of captured sampling: nothing is drawn; nothing is ordered or penalised; everything may be asked for."""


class Engine:
    """The device side of a runtime: model, caches, owners and sampler around one scheduler.

    `step` is called by one thread at a time. It may leave one step in flight, so that the host plans the next one and
    takes the last one into account while the device works. `lock` guards the accounts (the scheduler, who reads what,
    which slots are bound) and is held only while they change, not while the device works.

    Attributes:
        plan_updates: plan owners' updates so far.
        fatal: the fault after which no further step can be made, if there was one: a lost device, or an exception that
            left the accounts half changed.
        owned: the live buffers behind each owned line of the ledger, by the line's name.
        graphs: captured decode steps; None where there are none.
        prompts: captured steps of short prompts; None where there are none.
        captured: what the captured steps took of the device's memory; None where there are none.
        graph_steps: steps that were replayed so far.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        model: DecoderModel,
        owners: dict[AttentionGeometry, PlanOwner],
        rotary: dict[AttentionGeometry, RotaryTable],
        cache: KvCache,
        state: StatePool | None,
        inputs: StepInputs,
        sampling: SamplingBatch,
        scheduler: Scheduler,
        owned: Mapping[str, Buffers],
        end_token_ids: Sequence[int],
        seed: int,
    ) -> None:
        self.blueprint = blueprint
        self.model = model
        self.owners = owners
        self.rotary = rotary
        self.cache = cache
        self.state = state
        self.inputs = inputs
        self.sampling = sampling
        self.scheduler = scheduler
        self.owned = dict(owned)
        self.graphs: DecodeGraphs | None = None
        self.prompts: ShortPrompts | None = None
        self.captured: Taken | None = None
        self.graph_steps = 0
        self.lock = threading.RLock()
        self._attempt = Attempt(self.lock)
        self.plan_updates = 0
        self.fatal: BaseException | None = None
        self._end_token_ids = frozenset(end_token_ids)
        self._seed = seed
        self._outputs: dict[int, RequestOutput] = {}
        self._ends: dict[int, frozenset[int]] = {}
        self._bound_slots: dict[int, int] = {}
        self._cancelled: deque[Request] = deque()
        self._in_flight: Launched | None = None
        self._planned: list[StepPlan] = []  # neither accepted nor failed
        self._ended_s = 0.0
        self._on_device = inputs.device.type == "cuda"
        self._keeps_tokens = self._on_device  # whether the newest token of each slot is kept on the device
        self._changing = False
        self._changed_by = 0  # the thread that changes the accounts, or did last
        self._closed = False

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.has_work

    @property
    def busy(self) -> bool:
        """Whether a step is in flight."""
        return self._in_flight is not None

    @property
    def changing_here(self) -> bool:
        """Whether this thread is in the middle of a change of the accounts: it handles a signal, say."""
        return self._changing and self._changed_by == threading.get_ident()

    def submit(self, request: Request, output: RequestOutput) -> None:
        """Queue a request that passed the admission gate."""

        def queue() -> None:
            sampling = request.sampling
            if request.id in self._outputs:
                raise AccountingError(f"{request!r} was submitted before")
            try:
                self._outputs[request.id] = output
                if sampling is not None:
                    own = frozenset(sampling.stop_token_ids)
                    self._ends[request.id] = own if sampling.ignore_eos else own | self._end_token_ids
                self.scheduler.submit(request)
            except BaseException:  # an interrupt, too, leaves nothing behind
                self.scheduler.withdraw(request)
                self._outputs.pop(request.id, None)
                self._ends.pop(request.id, None)
                raise

        self._account(queue, undone=True)
        logger.debug(
            "request %d submitted: %d prompt tokens, at most %d new",
            request.id,
            request.prompt_tokens,
            request.max_new_tokens,
            extra={"request_id": request.id},
        )

    def cancel(self, *requests: Request) -> None:
        """End `requests` as cancelled, wherever they are; nothing happens if one has ended or was never submitted.

        Never waits, because the garbage collector may call it (a stream that was dropped) on any thread and in the
        middle of anything. While the accounts are being changed it is only noted: who changes them carries it out
        afterwards, or at the latest the next step does.
        """
        self._cancelled.extend(requests)
        with self._attempt.take as taken:
            if taken:
                with self._attempt.taken:
                    self._account(lambda: None, undone=True)

    def counters(self) -> dict[str, int]:
        """Counters of the scheduler and of this engine, all of the same moment."""

        def counted() -> dict[str, int]:
            own = {"plan_updates": self.plan_updates, "graph_steps": self.graph_steps}
            return self.scheduler.counters() | own

        return self._account(counted, undone=True)

    def end_all(self, error: BaseException) -> None:
        """End every open request with `error`. Nothing can be submitted or cancelled any more."""
        with self.lock:
            self._changing, self._changed_by = True, 0  # for good, and by nobody
            while self._cancelled:
                output = self._outputs.pop(self._cancelled.popleft().id, None)
                if output is not None:
                    output.finish("cancelled")
            outputs = list(self._outputs.values())
            self._outputs.clear()
            self._ends.clear()
            for output in outputs:
                output.finish("error", error)

    def step(self, *, overlap: bool = False) -> list[StepReport]:
        """Plan and launch one step, and take steps into account; what ended, oldest first.

        An exception inside a step ends the requests of that step and no other; it is not raised here. An interrupt is,
        and is fatal where it leaves a plan that nobody holds any more.

        Args:
            overlap: leave the launched step in flight and take the one before it into account meanwhile. Otherwise
                nothing is in flight afterwards. Pointless where the host computes the steps itself.
        """
        try:
            return self._advance(overlap)
        except BaseException as error:
            held = self._in_flight.plan if self._in_flight is not None else None
            if any(plan is not held for plan in self._planned):
                self.fatal = self.fatal or error
            raise

    def _advance(self, overlap: bool) -> list[StepReport]:
        reports = []
        self._keeps_tokens |= overlap
        if not overlap and self._in_flight is not None:
            reports.append(self._complete())
        started = time.perf_counter()
        plan: StepPlan | None = None
        given_up = 0

        def take() -> None:
            nonlocal plan, given_up
            plan = self.scheduler.schedule()
            if plan is not None:
                self._planned.append(plan)
            for request in self.scheduler.take_given_up():
                self._settle(request)
                given_up += 1

        try:
            self._account(take)
            launched = Launched(plan, self._compute(plan), started) if plan is not None else None
        except BaseException as error:
            try:
                if self._in_flight is not None:
                    reports.append(self._complete())
            finally:
                if plan is not None:
                    reports.append(self._fail(plan, error, started, given_up))
            if plan is None or not isinstance(error, Exception):
                raise
            return reports
        before, self._in_flight = self._in_flight, launched
        if before is not None:
            reports.append(self._complete(before))
        if launched is not None and not overlap:
            reports.append(self._complete())
        if given_up:
            last = reports.pop() if reports else StepReport()
            reports.append(evolve(last, failed=last.failed + given_up))
        return reports

    def _complete(self, launched: Launched | None = None) -> StepReport:
        """Take a step into account, once the device has computed it; by default the one in flight."""
        if launched is None:
            launched, self._in_flight = self._in_flight, None
        assert launched is not None
        plan = launched.plan
        try:
            samples, scores = launched.results.wait()
        except BaseException as error:
            report = self._fail(plan, error, launched.started_s)
            if not isinstance(error, Exception):
                raise
            return report

        def accept() -> tuple[int, int]:
            accepted = self._accept(plan, samples, scores)
            self._forget(plan)
            return accepted

        return self._report(plan, launched.started_s, *self._account(accept))

    def _fail(self, plan: StepPlan, error: BaseException, started_s: float, given_up: int = 0) -> StepReport:
        """End the requests of a step that raised."""
        release_locals(error)
        lost = lost_device(self.inputs.device, error)
        if lost is not None:
            self.fatal = lost

        def end() -> int:
            failed = given_up + len(self.scheduler.fail(plan, error))
            what = f"{type(error).__name__}: {error}"
            logger.warning("step %d failed and ends %d requests: %s", plan.serial, failed, what)
            for request in plan.requests:
                self._settle(request)
            self._forget(plan)
            return failed

        return self._report(plan, started_s, 0, self._account(end))

    def _forget(self, plan: StepPlan) -> None:
        self._planned = [other for other in self._planned if other is not plan]

    def _report(self, plan: StepPlan, started_s: float, new_tokens: int, failed: int) -> StepReport:
        now = time.perf_counter()
        started_s, self._ended_s = max(started_s, self._ended_s), now
        return StepReport(
            prefill_tokens=plan.prefill_tokens,
            decode_tokens=plan.decode_tokens,
            path=plan.path,
            rows=len(plan.requests),
            new_tokens=new_tokens,
            failed=failed,
            duration_ms=(now - started_s) * 1e3,
        )

    def close(self) -> None:
        """Release all memory, though somebody may go on holding this engine. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as releases:  # all of them, whichever raises; the last that is named comes first
            for buffers in self.owned.values():
                releases.callback(buffers.close)
            if self.state is not None:
                releases.callback(self.state.close)
            releases.callback(self.cache.close)
            for owner in self.owners.values():
                releases.callback(owner.close)
            for captured in (self.graphs, self.prompts):
                if captured is not None:
                    releases.callback(captured.close)
            self._in_flight = None
            # Both hold views of their buffers, which would keep the storages alive.
            del self.model, self.sampling

    def _account(self, change: Callable[[], Result], *, undone: bool = False) -> Result:
        """Hold the accounts for `change`, and carry out the cancellations that were noted before and meanwhile.

        An exception that gets out is fatal, since it may have left them half changed. This is no context manager:
        an interrupt inside the library's own would get out unseen.

        Args:
            undone: where `change` raises, it has left the accounts as they were.
        """
        with self.lock:
            outer, harmless = self._changing, True
            try:
                self._changing, self._changed_by = True, threading.get_ident()
                if not outer:
                    self._carry_out_cancellations()
                harmless = undone
                result = change()
                harmless = True
                if not outer:
                    self._carry_out_cancellations()
                return result
            except BaseException as error:
                if not harmless:
                    self.fatal = self.fatal or error
                raise
            finally:
                self._changing = outer

    def _carry_out_cancellations(self) -> None:
        while self._cancelled:
            request = self._cancelled[0]
            if request.id in self._outputs:  # it was submitted, and has not ended
                try:
                    self.scheduler.cancel(request)
                    self._settle(request)
                except BaseException as error:
                    self.fatal = self.fatal or error
                    raise
            self._cancelled.popleft()

    def _bind(self, plan: StepPlan) -> None:
        for row in plan.fresh_rows:
            request = plan.requests[row]
            if request.sampling is not None:
                seed = derive_seed(self._seed, request.id)
                self.sampling.bind(request.slot, request.sampling, request.tokens[: request.prompt_tokens], seed)
                self._bound_slots[request.id] = request.slot

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> Results:
        """Queue the step on the device; where the device is the host, compute it."""
        with torch.cuda.device(self.inputs.device) if self._on_device else nullcontext():
            self.inputs.begin()
            try:
                return self._queue(plan)
            except BaseException:
                self.inputs.end()  # what was queued may still read them
                raise

    def _queue(self, plan: StepPlan) -> Results:
        self._bind(plan)
        self._set_state(plan)
        every_row = len(plan.sampling_rows) == len(plan.requests)
        sampled_slots = plan.slots if every_row else plan.slots[list(plan.sampling_rows)]
        bucket = self.graphs.bucket_of(plan) if self.graphs is not None else None
        groups = self.sampling.groups(sampled_slots, on_device=bucket is None)
        sampled: SampleResult | CapturedSamples | None
        scores: dict[int, list[torch.Tensor]] = {}
        if bucket is not None:
            sampled = self._replay(bucket, plan, groups)
        else:
            hidden, slots, dropped = self._forward_rows(plan)
            sampled = self._sample_rows(plan, hidden, slots, groups, dropped)
            scores = self._score(plan, hidden)
        if self.state is not None:
            for slot, snapshot in plan.saves:
                self.state.save(slot, snapshot)
        packed = self.inputs.fetch(sampled.packed()) if sampled is not None else None
        return Results(sampled, packed, scores, self.inputs.end())

    def _set_state(self, plan: StepPlan) -> None:
        if self.state is not None:
            for snapshot, slot in plan.restores:
                self.state.restore(snapshot, slot)
            self.state.clear(plan.clears)

    def _replay(self, bucket: Bucket, plan: StepPlan, groups: SampleGroups) -> SampleResult | CapturedSamples:
        """A pure decode step on a captured graph."""
        assert self.graphs is not None
        self.graphs.replay(bucket, plan)
        self.plan_updates += len(self.owners)
        self.graph_steps += 1
        if all(count <= CAPTURED_ALTERNATIVES for _, count in groups.scored):
            kind = GREEDY if not groups.special else DRAWN if groups.only_drawn else FULL
            return bucket.draw(kind, groups)
        groups = self.sampling.groups(plan.slots)
        rows = len(plan.requests)
        slots, positions = self.inputs["slots"][:rows], self.inputs["sampled_positions"][:rows]
        return self._sample(bucket.logits[:rows], slots, positions, groups)

    def _forward_rows(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Hidden states, the slot of each row on the device, and whether only sampled tokens are among the former."""
        prompt = self.prompts.bucket_of(plan) if self.prompts is not None else None
        if self.prompts is not None and prompt is not None:
            self.plan_updates += len(self.owners)
            self.graph_steps += 1
            return *self.prompts.replay(prompt, plan), False
        for attention, owner in self.owners.items():
            owner.update(plan.batch(attention.query_heads, attention.kv_heads))
            self.plan_updates += 1
        token_ids = self.inputs.fill("token_ids", plan.token_ids())
        slots = self.inputs.fill("slots", plan.slots)
        if plan.carried_rows:
            token_ids[: plan.decode_rows] = self.inputs["slot_tokens"][slots[: plan.decode_rows]]
        rows = PackedRows(plan.lengths, token_ids.device, cuts=plan.cuts)
        drops = rows.tokens > len(plan.sampling_rows) and not plan.scores
        outputs = None
        if drops:  # of a step that gives nothing, one token is computed to the end
            outputs = self.inputs.fill("sampled_tokens", plan.sampled_tokens if plan.sampling_rows else NO_OUTPUTS)
        return self.forward(token_ids, slots, rows, plan.decode_rows, outputs), slots, drops

    def forward(
        self,
        token_ids: torch.Tensor,
        slots: torch.Tensor,
        rows: PackedRows,
        decode_rows: int,
        outputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of a step for which the owners are updated.

        Returns:
            ``[tokens, hidden_size]``, or of the tokens `outputs` alone.
        """
        context = StepContext(
            geometry=self.blueprint.geometry,
            owners=self.owners,
            rotary=self.rotary,
            cache=self.cache,
            state=self.state,
            rows=rows,
            decode_rows=decode_rows,
            slots=slots,
            outputs=outputs,
        )
        hidden = self.model(token_ids, context)
        if self.blueprint.capacity.fused_recurrence and rows.rows > decode_rows and not context.made_cuts:
            raise PluginError(
                f"model type {self.blueprint.geometry.model_type!r}: a recurrent layer went through "
                "StepContext.delta_rule_projected in the start-up profile and otherwise in this step, where snapshots "
                "inside a prompt or a captured prompt rely on it; expected the same way in every step with prefill rows"
            )
        if outputs is None:
            return hidden
        if not context.dropped_tokens:
            return hidden.index_select(0, outputs)
        if hidden.shape[0] != len(outputs):
            raise PluginError(
                f"model type {self.blueprint.geometry.model_type!r} returned hidden states of {hidden.shape[0]} "
                f"tokens, expected the {len(outputs)} that StepContext.wanted gave its last layer to go on with"
            )
        return hidden

    def _sample_rows(
        self, plan: StepPlan, hidden: torch.Tensor, slots: torch.Tensor, groups: SampleGroups, dropped: bool
    ) -> SampleResult | None:
        if not plan.sampling_rows:
            return None
        if not dropped and len(plan.sampling_rows) != hidden.shape[0]:
            hidden = hidden.index_select(0, self.inputs.fill("sampled_tokens", plan.sampled_tokens))
        positions = plan.kv_lengths
        if len(plan.sampling_rows) != len(plan.requests):
            rows = list(plan.sampling_rows)
            slots, positions = self.inputs.fill("sampled_slots", plan.slots[rows]), positions[rows]
        on_device = self.inputs.fill("sampled_positions", positions)
        return self._sample(self.model.logits(hidden), slots, on_device, groups)

    def _sample(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, groups: SampleGroups
    ) -> SampleResult:
        """The next token of every row, which becomes the newest of its slot."""
        result = sample(self.sampling, logits, slots, positions, groups)
        self.sampling.accept(slots, result.token_ids, groups)
        if self._keeps_tokens:
            self.inputs["slot_tokens"].index_copy_(0, slots, result.token_ids)
        return result

    def capture_graphs(self) -> Iterator[tuple[int, int]]:
        """Capture the decode steps and the prompts of the capacity's buckets; does nothing where it has none.

        Yields:
            After each, the number of steps captured so far and of all.

        Raises:
            ConfigError: a plan owner's decode steps cannot be captured.
            MemoryBudgetError: the graphs take more than the ledger's line for them.
        """
        capacity = self.blueprint.capacity
        if not capacity.graph_buckets:
            return

        def forward(token_ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            rows = PackedRows((1,) * len(token_ids), token_ids.device)
            return self.model.logits(self.forward(token_ids, slots, rows, len(token_ids)))

        def prompt(token_ids: torch.Tensor, slots: torch.Tensor, rows: PackedRows) -> torch.Tensor:
            return self.forward(token_ids, slots, rows, 0)

        pool, padding_slot = GraphPool(self.inputs.device), capacity.limits.max_requests
        plans = CapturedPlans(self.owners, self.blueprint.ledger.kv_pages)
        self.prompts = ShortPrompts(
            plans,
            self.inputs,
            page_size=capacity.limits.page_size,
            padding_slot=padding_slot,
            forward=prompt,
            recurrent=self.blueprint.geometry.hybrid,
            most_read_tokens=most_read_tokens(self.blueprint),
        )
        self.graphs = DecodeGraphs(
            plans,
            self.inputs,
            padding_slot=padding_slot,
            forward=forward,
            sample=self._sample,
            kinds={GREEDY: lambda rows: PLAIN, DRAWN: self.sampling.drawn_groups, FULL: self.sampling.any_groups},
        )
        captures: list[tuple[int, Callable[[int, GraphPool], None]]]
        captures = [(rows, self.graphs.capture) for rows in capacity.graph_buckets]
        captures += [(tokens, self.prompts.capture) for tokens in capacity.prompt_buckets]
        captures.sort(key=lambda each: each[0], reverse=True)
        for index, (size, capture) in enumerate(captures):
            capture(size, pool)
            yield index + 1, len(captures)
        self.captured = pool.taken()
        self.captured.check(self.blueprint.ledger)

    def _score(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[torch.Tensor]]:
        """Log-probabilities of each scored row's next prompt tokens, in blocks of the reserved rows of logits."""
        scores: dict[int, list[torch.Tensor]] = {}
        block_rows = self.blueprint.capacity.logit_rows
        first = plan.decode_rows  # a scored prompt is never decoded, and decode rows have a token each
        for row in range(plan.decode_rows, len(plan.requests)):
            request, start, tokens = plan.requests[row], plan.starts[row], plan.lengths[row]
            output = self._outputs.get(request.id)
            if request.kind == "score" and output is not None:
                known = min(tokens, request.prompt_tokens - 1 - start)
                targets = torch.tensor(request.tokens[start + 1 : start + 1 + known], dtype=torch.int64)
                targets = to_device(targets, hidden.device)
                scores[row] = []
                for block in range(0, known, block_rows):
                    last = min(block + block_rows, known)
                    logits = self.model.logits(hidden[first + block : first + last])
                    logprobs = token_logprobs(logits, targets[block:last], output.score_top)
                    scores[row].append(logprobs.packed().to("cpu", non_blocking=True))
            first += tokens
        return scores

    def _accept(
        self, plan: StepPlan, samples: HostSamples | None, scores: dict[int, list[TokenLogprob]]
    ) -> tuple[int, int]:
        if samples is not None:
            samples = samples.first(len(plan.sampling_rows))
        tokens = samples.token_ids if samples is not None else []
        endings: dict[Request, Ending] = {}
        given = 0
        columns = (tokens, samples.bad, samples.logprobs) if samples is not None else ((), (), ())
        for row, token_id, bad, logprob in zip(plan.sampling_rows, *columns, strict=True):
            request = plan.requests[row]
            output = self._outputs.get(request.id)
            if output is None or output.finish_reason is not None:
                continue
            if bad:
                error = UnusableLogits(
                    f"request {request.id}: the logits of token {int(plan.kv_lengths[row])} hold NaN or no finite value"
                )
                endings[request] = Ending("error", error)
                continue
            try:
                if self._hand_over(request, output, token_id, logprob):
                    endings[request] = Ending("stop")
                given += 1
            except Exception as error:
                endings[request] = Ending("error", error)
        for row, values in scores.items():
            request = plan.requests[row]
            output = self._outputs.get(request.id)
            if output is not None:
                output.score += values
                if any(math.isnan(value.logprob) for value in values):
                    endings[request] = Ending("error", UnusableLogits(f"request {request.id}: logits hold NaN"))
        ended = self.scheduler.complete(plan, tokens, endings)
        failed = sum(request.finish_reason == "error" for request in ended)
        for request in plan.requests:
            if request.status is Status.FINISHED:  # also by a cancellation while the step was in flight
                self._settle(request)
        return given, failed

    def _hand_over(self, request: Request, output: RequestOutput, token_id: int, logprob: TokenLogprob | None) -> bool:
        """Give a token to the request's readers; returns whether it ends the request by ``"stop"``."""
        ends = token_id in self._ends[request.id]
        last = len(request.tokens) + 1 >= request.prompt_tokens + request.max_new_tokens
        piece: str | None = None
        decoder = output.stop_decoder
        if decoder is not None:
            piece = "" if ends else decoder.push(token_id)
            ends = ends or decoder.stopped
            if (ends or last) and not decoder.stopped:
                piece += decoder.finish()
                ends = ends or decoder.stopped
        reason = "stop" if ends else "length" if last else None
        output.put(token_id, logprob, piece, reason)
        return ends

    def _settle(self, request: Request) -> None:
        """Tell the readers of a request that has ended, and forget it."""
        if not request.done:
            return
        output = self._outputs.pop(request.id, None)
        self._ends.pop(request.id, None)
        if not request.in_flight and (slot := self._bound_slots.pop(request.id, None)) is not None:
            self.sampling.release(slot)
        if output is not None:
            assert request.finish_reason is not None
            output.finish(request.finish_reason, request.error)
            level = logging.DEBUG if request.error is None else logging.WARNING
            logger.log(
                level,
                "request %d ended (%s) after %d prompt and %d new tokens%s",
                request.id,
                request.finish_reason,
                request.prompt_tokens,
                request.new_tokens,
                f": {type(request.error).__name__}: {request.error}" if request.error is not None else "",
                extra={"request_id": request.id},
            )
