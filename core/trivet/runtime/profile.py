"""The start-up profile: the worst mixed step, run once before pages are allocated."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from attrs import frozen

from trivet.attention import Selection, StepBatch
from trivet.caches.kv import KvCache, kv_layout
from trivet.caches.state import StatePool
from trivet.capacity import PlanCapacity, RuntimeCapacity
from trivet.errors import PluginError
from trivet.geometry import AttentionGeometry
from trivet.layers.context import StepContext
from trivet.layers.decoder import DecoderModel
from trivet.layers.rotary import RotaryTable
from trivet.ops.packed import PackedRows
from trivet.reservation import size_text
from trivet.reservation.activations import StepBounds, step_bounds
from trivet.runtime.step_meter import StepMeter, metered
from trivet.sampling.batch import SamplingBatch
from trivet.sampling.layout import sampler_scratch_bytes
from trivet.sampling.sampler import sample

CPU_CONTEXT_TOKENS = 4096
"""Contexts beyond this only repeat work that is bounded by tiles, and would make loading slow on a CPU."""


@frozen
class Profile:
    """What the profile measured.

    Attributes:
        layers_bytes: most bytes of temporaries that were alive at once while the layers computed, without attention's;
            plan buffers are not among them.
        forward_bytes: the same with attention's.
        sampling_bytes: most from then on, while logits were computed and sampled from.
        fused_recurrence: whether all recurrent layers, if there are any, went through the shared kernels.
    """

    layers_bytes: int
    forward_bytes: int
    sampling_bytes: int
    fused_recurrence: bool

    @property
    def peak_bytes(self) -> int:
        """Of the whole step."""
        return max(self.forward_bytes, self.sampling_bytes)


def profiled_bounds(capacity: RuntimeCapacity, selections: Mapping[AttentionGeometry, Selection]) -> StepBounds:
    """What each part of a step may keep alive, by the paths that serve: the larger is the ledger's activation line.

    Where snapshots lie is left open, which makes a recurrent layer's table of chunks a little longer than planned.
    """
    scratch_bytes = sum(selections[plan.attention].path.scratch_bytes(plan, capacity.dtype) for plan in capacity.plans)
    sampling_bytes = sampler_scratch_bytes(capacity.logit_rows, capacity.geometry.vocab_size, capacity.device.kind)
    return step_bounds(capacity, scratch_bytes, sampling_bytes)


def worst_lengths(capacity: RuntimeCapacity) -> tuple[list[int], list[int]]:
    """Query and KV lengths of the worst mixed step: every row, every token, every context as long as it may be."""
    limits, rows = capacity.limits, capacity.step_rows
    context = limits.max_context
    if capacity.device.kind == "cpu":
        context = min(context, max(CPU_CONTEXT_TOKENS, -(-capacity.step_tokens // rows)))
    query_lengths = [1] * rows
    left = capacity.step_tokens - rows
    for row in reversed(range(rows)):
        taken = min(left, context - 1)
        query_lengths[row] += taken
        left -= taken
    return query_lengths, [context] * rows


@torch.inference_mode()
def run_profile(
    capacity: RuntimeCapacity,
    selections: dict[AttentionGeometry, Selection],
    model: DecoderModel,
    rotary: dict[AttentionGeometry, RotaryTable],
    state: StatePool | None,
    sampling: SamplingBatch,
    device: torch.device,
    activation_bytes: int,
) -> Profile:
    """Run the worst mixed step with temporary owners of `capacity`, and hold the peak of each part against its bound.

    Every context lies on the padding page of a temporary cache: page lists are logical, so that no pool is needed.

    Args:
        activation_bytes: the ledger's line, which no part may exceed.

    Raises:
        PluginError: the family's layers, or its logits, keep more alive than the plan allows for.
    """
    query_lengths, kv_lengths = worst_lengths(capacity)
    page_size = capacity.limits.page_size
    cache_buffers = kv_layout(capacity.geometry, page_size, 0, capacity.dtype).allocate(device)
    for spec in cache_buffers.layout.specs:
        cache_buffers[spec.name].zero_()
    cache = KvCache(capacity.geometry, page_size, cache_buffers)
    owners = {}
    for plan in capacity.plans:
        path = selections[plan.attention].path
        owners[plan.attention] = path.bind(plan, path.layout(plan).allocate(device))
    meter = StepMeter()
    try:
        with meter:
            meter.begin_forward()
            for plan in capacity.plans:
                owners[plan.attention].update(_worst_batch(plan, query_lengths, kv_lengths))
            context = StepContext(
                geometry=capacity.geometry,
                owners={attention: metered(owner, meter) for attention, owner in owners.items()},
                rotary=rotary,
                cache=cache,
                state=state,
                rows=PackedRows(tuple(query_lengths), device),
                decode_rows=_decode_rows(query_lengths),
                slots=torch.arange(len(query_lengths), device=device),
            )
            hidden = model(torch.zeros(sum(query_lengths), dtype=torch.int64, device=device), context)
            meter.end_forward()
            rows = min(capacity.step_rows, hidden.shape[0])
            logits = model.logits(hidden[: capacity.logit_rows])
            slots = torch.arange(rows, device=device)
            sample(sampling, logits[:rows], slots, slots, sampling.any_groups(rows)).to_host()
            meter.end()
    finally:
        for owner in owners.values():
            owner.close()
        cache.close()
    _require_within(profiled_bounds(capacity, selections), meter, capacity, activation_bytes)
    return Profile(meter.layers_bytes, meter.forward_bytes, meter.sampling_bytes, context.made_cuts)


def _require_within(bounds: StepBounds, found: StepMeter, capacity: RuntimeCapacity, activation_bytes: int) -> None:
    """`PluginError` if a part of the step took more than its bound, or than the ledger's line.

    On a CUDA device the line alone counts: there layers are planned with one kernel from projection to attention, and
    one that serves without it, or shares a product of few rows among programs, may take what another part leaves.
    """
    layers = "a layer of the family keeps more temporaries than the shared layers do"
    attention = "a decode path takes more than its scratch_bytes states"
    logits = (
        "the family's logits take more than a row for each that is asked for, or its layers leave temporaries behind"
    )
    forward = f"{layers}, or {attention}"
    parts = (
        ("attention", found.attention_bytes, bounds.attention_bytes, attention),
        ("layers", found.layers_bytes, bounds.layers_bytes, layers),
        ("layers and attention", found.forward_bytes, bounds.forward_bytes, forward),
        ("logits and sampling", found.sampling_bytes, bounds.sampling_bytes, logits),
    )
    on_cpu = capacity.device.kind == "cpu"
    for part, part_bytes, own_bytes, advice in parts:
        bound_bytes = min(own_bytes, activation_bytes) if on_cpu else activation_bytes
        if part_bytes > bound_bytes:
            raise PluginError(
                f"the start-up profile of model type {capacity.geometry.model_type!r}: in a step of "
                f"{capacity.step_tokens} tokens its {part} kept {size_text(part_bytes)} alive, "
                f"{size_text(part_bytes - bound_bytes)} more than their planned bound of {size_text(bound_bytes)}: "
                f"{advice}; free them earlier"
            )


def _decode_rows(query_lengths: list[int]) -> int:
    """How many leading rows are decode rows: all of one token, but for the last row, which is a prefill row."""
    return sum(length == 1 for length in query_lengths[:-1])


def _worst_batch(plan: PlanCapacity, query_lengths: list[int], kv_lengths: list[int]) -> StepBatch:
    counts = [-(-length // plan.limits.page_size) for length in kv_lengths]
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return StepBatch(
        query_lengths=query_lengths,
        kv_lengths=kv_lengths,
        page_indptr=indptr,
        page_indices=np.zeros(indptr[-1], dtype=np.int32),
        decode_rows=_decode_rows(query_lengths),
        query_heads=plan.query_heads,
        kv_heads=plan.kv_heads,
    )
