"""Carries out one step: what the scheduler planned, on the device, and back to the requests."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from trivet.attention import PlanOwner
from trivet.caches.kv import KvCache
from trivet.caches.state import StatePool
from trivet.errors import RequestRejected, UnusableLogits
from trivet.geometry import AttentionGeometry
from trivet.layers.context import StepContext
from trivet.layers.decoder import DecoderModel
from trivet.layers.rotary import RotaryTable
from trivet.layout import Buffers
from trivet.ops.packed import PackedRows
from trivet.runtime.blueprint import Blueprint
from trivet.runtime.fault import device_is_lost, release_locals
from trivet.runtime.output import RequestOutput
from trivet.runtime.step import StepReport
from trivet.sampling.batch import SamplingBatch
from trivet.sampling.logprobs import TokenLogprob, token_logprobs
from trivet.sampling.sampler import HostSamples, sample
from trivet.sampling.seeds import derive_seed
from trivet.scheduler.plan import Ending, StepPlan
from trivet.scheduler.request import Request, Status
from trivet.scheduler.scheduler import Scheduler

logger = logging.getLogger("trivet.engine")


class Engine:
    """The device side of a runtime: model, caches, owners and sampler around one scheduler.

    `step` is called by one thread at a time. `lock` guards the accounts (the scheduler, who reads what, which slots are
    bound) and is held only while they change, not while the device works.

    Attributes:
        plan_updates: plan owners' updates so far.
        fatal: the fault after which no further step can be made, if there was one: a lost device, or an exception that
            left the accounts half changed.
        owned: the live buffers behind each owned line of the ledger, by the line's name.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        model: DecoderModel,
        owners: dict[AttentionGeometry, PlanOwner],
        rotary: dict[AttentionGeometry, RotaryTable],
        cache: KvCache,
        state: StatePool | None,
        inputs: Buffers,
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
        self.lock = threading.RLock()
        self.plan_updates = 0
        self.fatal: BaseException | None = None
        self._end_token_ids = frozenset(end_token_ids)
        self._seed = seed
        self._outputs: dict[int, RequestOutput] = {}
        self._ends: dict[int, frozenset[int]] = {}
        self._bound_slots: dict[int, int] = {}
        self._cancelled: deque[Request] = deque()
        self._changing = False
        self._closed = False

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.has_work

    def submit(self, request: Request, output: RequestOutput) -> None:
        """Queue a request that passed the admission gate."""
        with self._accounts():
            self.scheduler.submit(request)
            self._outputs[request.id] = output
            sampling = request.sampling
            if sampling is not None:
                own = frozenset(sampling.stop_token_ids)
                self._ends[request.id] = own if sampling.ignore_eos else own | self._end_token_ids
        logger.debug(
            "request %d submitted: %d prompt tokens, at most %d new",
            request.id,
            request.prompt_tokens,
            request.max_new_tokens,
            extra={"request_id": request.id},
        )

    def cancel(self, request: Request) -> None:
        """End `request` as cancelled, wherever it is; nothing happens if it has ended.

        Never waits, because the garbage collector may call it (a stream that was dropped) on any thread and in the
        middle of anything. While the accounts are being changed it is only noted: who changes them carries it out
        afterwards, or at the latest the next step does.
        """
        self._cancelled.append(request)
        if self.lock.acquire(blocking=False):
            try:
                with self._accounts():
                    pass
            finally:
                self.lock.release()

    def end_all(self, error: BaseException) -> None:
        """End every open request with `error`. Nothing can be submitted or cancelled any more."""
        with self.lock:
            self._changing = True
            while self._cancelled:
                output = self._outputs.pop(self._cancelled.popleft().id, None)
                if output is not None:
                    output.finish("cancelled")
            outputs = list(self._outputs.values())
            self._outputs.clear()
            self._ends.clear()
            for output in outputs:
                output.finish("error", error)

    def step(self) -> StepReport:
        """Plan, compute and complete one step; returns at once when there is nothing to do.

        An exception inside the computation ends the requests of the step and no other; it is not raised here.
        """
        started = time.perf_counter()
        with self._accounts():
            plan = self.scheduler.schedule()
        if plan is None:
            return StepReport()
        new_tokens, failed = 0, 0
        try:
            samples, scores = self._compute(plan)
        except BaseException as error:
            release_locals(error)
            if device_is_lost(error):
                self.fatal = error
            with self._accounts():
                failed = len(self.scheduler.fail(plan, error))
                logger.warning("step %d failed and ends %d requests: %s", plan.serial, failed, error)
                for request in plan.requests:
                    self._settle(request)
            if not isinstance(error, Exception):
                raise
        else:
            with self._accounts():
                new_tokens, failed = self._accept(plan, samples, scores)
        return StepReport(
            prefill_tokens=plan.prefill_tokens,
            decode_tokens=plan.decode_tokens,
            path=plan.path,
            rows=len(plan.requests),
            new_tokens=new_tokens,
            failed=failed,
            duration_ms=(time.perf_counter() - started) * 1e3,
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
            # Both hold views of their buffers, which would keep the storages alive.
            del self.model, self.sampling

    @contextmanager
    def _accounts(self) -> Iterator[None]:
        """Hold the accounts for a change, and carry out the cancellations that were noted before and meanwhile.

        An exception that gets out is fatal, since it may have left them half changed; a refusal has changed nothing.
        """
        with self.lock:
            outer, self._changing = self._changing, True
            try:
                if not outer:
                    self._carry_out_cancellations()
                yield
                if not outer:
                    self._carry_out_cancellations()
            except RequestRejected:
                raise
            except BaseException as error:
                self.fatal = self.fatal or error
                raise
            finally:
                self._changing = outer

    def _carry_out_cancellations(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            self.scheduler.cancel(request)
            self._settle(request)

    def _bind(self, plan: StepPlan) -> None:
        for row in plan.fresh_rows:
            request = plan.requests[row]
            if request.sampling is not None:
                seed = derive_seed(self._seed, request.id)
                self.sampling.bind(request.slot, request.sampling, request.tokens[: request.prompt_tokens], seed)
                self._bound_slots[request.id] = request.slot

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> tuple[HostSamples | None, dict[int, list[TokenLogprob]]]:
        self._bind(plan)
        for attention, owner in self.owners.items():
            owner.update(plan.batch(attention.query_heads, attention.kv_heads))
            self.plan_updates += 1
        token_ids = self.inputs.fill("token_ids", plan.token_ids())
        slots = self.inputs.fill("slots", plan.slots)
        if self.state is not None:
            for snapshot, slot in plan.restores:
                self.state.restore(snapshot, slot)
            self.state.clear(plan.clears)
        context = StepContext(
            geometry=self.blueprint.geometry,
            owners=self.owners,
            rotary=self.rotary,
            cache=self.cache,
            state=self.state,
            rows=PackedRows(plan.lengths, token_ids.device),
            decode_rows=plan.decode_rows,
            slots=slots,
        )
        hidden = self.model(token_ids, context)
        if self.state is not None:
            for slot, snapshot in plan.saves:
                self.state.save(slot, snapshot)
        return self._sample(plan, hidden, slots), self._score(plan, hidden)

    def _sample(self, plan: StepPlan, hidden: torch.Tensor, slots: torch.Tensor) -> HostSamples | None:
        if not plan.sampling_rows:
            return None
        host_slots, positions = plan.slots, plan.kv_lengths
        if len(plan.sampling_rows) == len(plan.requests) == hidden.shape[0]:
            sampled, sampled_slots = hidden, slots
        else:
            rows = np.array(plan.sampling_rows)
            host_slots, positions = host_slots[rows], positions[rows]
            last_tokens = np.cumsum(plan.query_lengths)[rows] - 1
            sampled = hidden.index_select(0, self.inputs.fill("sampled_tokens", last_tokens))
            sampled_slots = self.inputs.fill("sampled_slots", host_slots)
        groups = self.sampling.groups(host_slots)
        result = sample(
            self.sampling,
            self.model.logits(sampled),
            sampled_slots,
            self.inputs.fill("sampled_positions", positions),
            groups,
        )
        samples = result.to_host()
        self.sampling.accept(sampled_slots, result.token_ids, groups)
        return samples

    def _score(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[TokenLogprob]]:
        """Log-probabilities of each scored row's next prompt tokens, in blocks of the reserved rows of logits."""
        scores: dict[int, list[TokenLogprob]] = {}
        block_rows = self.blueprint.capacity.logit_rows
        first = plan.decode_rows  # a scored prompt is never decoded, and decode rows have a token each
        for row in range(plan.decode_rows, len(plan.requests)):
            request, start, tokens = plan.requests[row], plan.starts[row], plan.lengths[row]
            output = self._outputs.get(request.id)
            if request.kind == "score" and output is not None:
                known = min(tokens, request.prompt_tokens - 1 - start)
                targets = torch.tensor(request.tokens[start + 1 : start + 1 + known], dtype=torch.int64)
                targets = targets.to(hidden.device)
                scores[row] = []
                for block in range(0, known, block_rows):
                    last = min(block + block_rows, known)
                    logits = self.model.logits(hidden[first + block : first + last])
                    scores[row] += token_logprobs(logits, targets[block:last], output.score_top).tolist()
            first += tokens
        return scores

    def _accept(
        self, plan: StepPlan, samples: HostSamples | None, scores: dict[int, list[TokenLogprob]]
    ) -> tuple[int, int]:
        tokens = samples.token_ids if samples is not None else []
        endings: dict[Request, Ending] = {}
        given = failed = 0
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
                failed += 1
                continue
            try:
                if self._hand_over(request, output, token_id, logprob):
                    endings[request] = Ending("stop")
                given += 1
            except Exception as error:
                endings[request] = Ending("error", error)
                failed += 1
        for row, values in scores.items():
            request = plan.requests[row]
            output = self._outputs.get(request.id)
            if output is not None:
                output.score += values
                if any(math.isnan(value.logprob) for value in values):
                    endings[request] = Ending("error", UnusableLogits(f"request {request.id}: logits hold NaN"))
                    failed += 1
        self.scheduler.complete(plan, tokens, endings)
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
                f": {request.error}" if request.error is not None else "",
                extra={"request_id": request.id},
            )
