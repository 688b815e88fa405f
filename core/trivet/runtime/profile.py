"""The start-up profile: the worst mixed step, run once before pages are allocated."""

from __future__ import annotations

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
from trivet.runtime.meter import StorageMeter
from trivet.sampling.batch import SamplingBatch
from trivet.sampling.sampler import sample

CPU_CONTEXT_TOKENS = 4096
"""Contexts beyond this only repeat work that is bounded by tiles, and would make loading slow on a CPU."""


@frozen
class Profile:
    """What the profile measured.

    Attributes:
        peak_bytes: most bytes of temporaries that were alive at once, plan buffers subtracted.
        fused_recurrence: whether all recurrent layers, if there are any, went through the shared kernels.
    """

    peak_bytes: int
    fused_recurrence: bool


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
    """Run the worst mixed step with temporary owners of `capacity`, and hold its peak against the planned bound.

    Every context lies on the padding page of a temporary cache: page lists are logical, so that no pool is needed.

    Raises:
        PluginError: the family's layers keep more alive than the plan allows for.
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
    meter = StorageMeter()
    try:
        with meter:
            for plan in capacity.plans:
                owners[plan.attention].update(_worst_batch(plan, query_lengths, kv_lengths))
            context = StepContext(
                geometry=capacity.geometry,
                owners=owners,
                rotary=rotary,
                cache=cache,
                state=state,
                rows=PackedRows(tuple(query_lengths), device),
                decode_rows=_decode_rows(query_lengths),
                slots=torch.arange(len(query_lengths), device=device),
            )
            hidden = model(torch.zeros(sum(query_lengths), dtype=torch.int64, device=device), context)
            rows = min(capacity.step_rows, hidden.shape[0])
            logits = model.logits(hidden[: capacity.logit_rows])
            slots = torch.arange(rows, device=device)
            sample(sampling, logits[:rows], slots, slots, sampling.any_groups(rows)).to_host()
    finally:
        for owner in owners.values():
            owner.close()
        cache.close()
    peak_bytes = meter.peak_bytes
    if peak_bytes > activation_bytes:
        raise PluginError(
            f"the start-up profile of model type {capacity.geometry.model_type!r} kept {size_text(peak_bytes)} alive "
            f"in a step of {capacity.step_tokens} tokens, the planned bound is {size_text(activation_bytes)}: a layer "
            "of the family keeps more temporaries than the shared layers do; free them earlier"
        )
    return Profile(peak_bytes, context.made_cuts)


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
