"""Carries out one step: what the scheduler planned, on the device, and back to the requests."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from trivet.attention import PlanOwner
from trivet.caches.kv import KvCache
from trivet.caches.state import StatePool
from trivet.errors import TrivetError
from trivet.geometry import AttentionGeometry
from trivet.layers.context import StepContext
from trivet.layers.decoder import DecoderModel
from trivet.layers.rotary import RotaryTable
from trivet.layout import Buffers
from trivet.ops.packed import PackedRows
from trivet.runtime.blueprint import Blueprint
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


class UnusableLogits(TrivetError):
    """A row's logits hold NaN or no finite value; its request ends, the others go on."""


class Engine:
    """The device side of a runtime: model, caches, owners and sampler around one scheduler.

    `step` is called by one thread at a time. `lock` guards the scheduler and is held only while it plans and
    completes, not while the device works.

    Attributes:
        plan_updates: plan owners' updates so far.
        fatal: the fault that left the device unusable, if one has.
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

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.has_work

    def submit(self, request: Request, output: RequestOutput) -> None:
        """Queue a request that passed the admission gate."""
        with self.lock:
            self._outputs[request.id] = output
            sampling = request.sampling
            if sampling is not None:
                own = frozenset(sampling.stop_token_ids)
                self._ends[request.id] = own if sampling.ignore_eos else own | self._end_token_ids
            self.scheduler.submit(request)
        logger.debug(
            "request %d submitted: %d prompt tokens, at most %d new",
            request.id,
            request.prompt_tokens,
            request.max_new_tokens,
            extra={"request_id": request.id},
        )

    def cancel(self, request: Request) -> None:
        """End `request` as cancelled, wherever it is; nothing happens if it has ended."""
        with self.lock:
            self.scheduler.cancel(request)
            self._settle(request)

    def end_all(self, error: BaseException) -> None:
        """End every open request with `error`."""
        with self.lock:
            for output in self._outputs.values():
                output.finish("error", error)
            self._outputs.clear()
            self._ends.clear()

    def step(self) -> StepReport:
        """Plan, compute and complete one step; returns at once when there is nothing to do.

        An exception inside ends the requests of the step and no other; it is not raised here.
        """
        started = time.perf_counter()
        with self.lock:
            plan = self.scheduler.schedule()
            if plan is None:
                return StepReport()
        new_tokens, failed = 0, 0
        try:
            samples, scores = self._compute(plan)
        except BaseException as error:
            logger.warning("step %d failed and ends %d requests: %s", plan.serial, len(plan.requests), error)
            if _device_is_lost(error):
                self.fatal = error
            with self.lock:
                self.scheduler.fail(plan, error)
                failed = len(plan.requests)
                for request in plan.requests:
                    self._settle(request)
            if not isinstance(error, Exception):
                raise
        else:
            with self.lock:
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
        """Release every buffer. Idempotent."""
        for owner in self.owners.values():
            owner.close()
        self.cache.close()
        if self.state is not None:
            self.state.close()
        for buffers in self.owned.values():
            buffers.close()

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
        failed = 0
        columns = (tokens, samples.bad, samples.logprobs) if samples is not None else ((), (), ())
        for row, token_id, bad, logprob in zip(plan.sampling_rows, *columns, strict=True):
            request = plan.requests[row]
            output = self._outputs.get(request.id)
            if output is None or output.done:
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
        return max(0, len(tokens) - failed), failed

    def _hand_over(self, request: Request, output: RequestOutput, token_id: int, logprob: TokenLogprob | None) -> bool:
        """Give a token to the request's readers; returns whether it ends the request by ``"stop"``."""
        ends = token_id in self._ends[request.id]
        last = request.new_tokens + 1 >= request.max_new_tokens
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


def _device_is_lost(error: BaseException) -> bool:
    """Whether a CUDA fault has poisoned the process's context, after which every call fails."""
    return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)
