"""From a blueprint to a running engine: allocate what it says, fill the weights, run the profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from trivet.caches.kv import KvCache
from trivet.caches.pages import PagePool
from trivet.caches.prefix import PrefixCache
from trivet.caches.slots import SlotPool
from trivet.caches.state import StatePool
from trivet.config.generation import read_end_token_ids
from trivet.dtypes import as_torch
from trivet.errors import MemoryBudgetError, PluginError
from trivet.layers.decoder import DecoderModel
from trivet.layers.parameters import Parameters
from trivet.layers.rotary import RotaryTable
from trivet.layout import AllocationMeter, BufferLayout, Buffers, NoRoom
from trivet.reservation import CONTEXT_LINE, GRAPHS_LINE, KV_LINE, MemoryLedger, size_text
from trivet.runtime.blueprint import Blueprint
from trivet.runtime.device import current
from trivet.runtime.engine import Engine
from trivet.runtime.inputs import StepInputs
from trivet.runtime.kept import require_little_kept
from trivet.runtime.meter import StorageMeter
from trivet.runtime.profile import run_profile
from trivet.sampling.batch import SamplingBatch
from trivet.scheduler.scheduler import Scheduler
from trivet.weights.checkpoint import Checkpoint
from trivet.weights.loader import Progress, check, load_parameters
from trivet.weights.random import fill_random


def load_engine(
    blueprint: Blueprint,
    device: torch.device,
    meter: AllocationMeter,
    *,
    random_weights: bool,
    seed: int,
    progress: Progress | None = None,
) -> Engine:
    """Allocate, load, profile and capture. If anything fails, everything allocated so far is released.

    Args:
        progress: called with the bytes that are ready and their total, of the weights and, where steps are captured,
            of the ledger's line for them, an equal part with each.

    Raises:
        CheckpointError: the checkpoint does not hold what its config promises; before anything is allocated.
        MemoryBudgetError: the device has less room than the budget supposed; on CUDA before anything is allocated, if
            the driver says so then.
        PluginError: the family's model cannot be built, keeps tensors of its own, or more temporaries than planned.
    """
    end_token_ids = read_end_token_ids(blueprint.directory, blueprint.document)
    filled, captured = _stages(blueprint, progress) if progress is not None else (None, None)
    checkpoint: Checkpoint | None = None
    if not random_weights:
        checkpoint = Checkpoint.open(blueprint.directory)
        check(checkpoint, blueprint.weight_map)
    with _room(blueprint.ledger), current(device), ExitStack() as undo:
        if device.type == "cuda":
            _require_room(blueprint, device)
        owned: dict[str, Buffers] = {}

        def allocate(line: str, layout: BufferLayout) -> Buffers:
            buffers = layout.allocate(device, meter)
            undo.callback(buffers.close)
            owned[line] = buffers
            return buffers

        weights = allocate(blueprint.weights.name, blueprint.weights)
        if checkpoint is None:
            tensors = fill_random(blueprint.weight_map, weights, seed, filled)
        else:
            tensors = load_parameters(checkpoint, blueprint.weight_map, weights, blueprint.capacity.dtype, filled)
        build = blueprint.family.builder()
        with blueprint.family.blamed("build", torch.OutOfMemoryError), StorageMeter() as built:
            pinned = blueprint.capacity.numeric_policy == "pinned"
            model = build(blueprint.geometry, Parameters(tensors, pinned=pinned))
        require_little_kept(blueprint.family.name, blueprint.weight_map, built)
        engine = _assemble(blueprint, device, model, allocate, owned, end_token_ids, seed)
        _capture(engine, captured)
        undo.pop_all()
        return engine


def _capture(engine: Engine, progress: Progress | None) -> None:
    """Capture step after step. The family is blamed for what fails in a capture, and not for what `progress` raises."""
    captures = engine.capture_graphs()
    while True:
        with engine.blueprint.family.blamed("the capture of its decode steps", torch.OutOfMemoryError):
            counts = next(captures, None)
        if counts is None:
            return
        if progress is not None:
            progress(*counts)


def _stages(blueprint: Blueprint, progress: Progress) -> tuple[Progress, Progress]:
    """What weights and captures report to, on one scale of bytes that both add up to."""
    weights_bytes = blueprint.weights.total_bytes
    graphs_bytes = blueprint.ledger.line(GRAPHS_LINE).bytes if blueprint.capacity.graph_buckets else 0
    total_bytes = weights_bytes + graphs_bytes
    return (
        lambda filled_bytes, _: progress(filled_bytes, total_bytes),
        lambda steps, all_steps: progress(weights_bytes + graphs_bytes * steps // all_steps, total_bytes),
    )


def _require_room(blueprint: Blueprint, device: torch.device) -> None:
    """Hold what the ledger wants against what is free of a CUDA device and what torch holds of it unused.

    The driver's context is there already: its line is a bound of which most is taken.

    Raises:
        MemoryBudgetError: the ledger wants more.
    """
    ledger = blueprint.ledger
    wanted_bytes = ledger.total_bytes - blueprint.pinned_bytes - ledger.line(CONTEXT_LINE).bytes
    free_bytes, _ = torch.cuda.mem_get_info(device)
    unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if wanted_bytes > free_bytes + unused_bytes:
        raise _less_room(
            ledger,
            f"{size_text(free_bytes)} of {device} are free and {size_text(unused_bytes)} held unused by torch, and "
            f"beside the driver's context the ledger wants {size_text(wanted_bytes)}",
        )


@contextmanager
def _room(ledger: MemoryLedger) -> Iterator[None]:
    """Say what it means that the device runs out of memory, which the budget should have prevented."""
    try:
        yield
    except (torch.OutOfMemoryError, NoRoom) as error:
        raise _less_room(ledger, str(error)) from error


def _less_room(ledger: MemoryLedger, found: str) -> MemoryBudgetError:
    return MemoryBudgetError(
        f"the device has less room than the memory budget of {size_text(ledger.budget_bytes)} supposes ({found}): end "
        f"what else holds its memory, or lower memory_fraction, and kv_pages where that is given\n{ledger.table()}"
    )


def _assemble(
    blueprint: Blueprint,
    device: torch.device,
    model: DecoderModel,
    allocate: Callable[[str, BufferLayout], Buffers],
    owned: dict[str, Buffers],
    end_token_ids: tuple[int, ...],
    seed: int,
) -> Engine:
    capacity, geometry, limits = blueprint.capacity, blueprint.geometry, blueprint.capacity.limits
    dtype = as_torch(capacity.dtype)
    rotary = {
        attention: RotaryTable(attention.rope, allocate(f"rotary table {attention.label}", layout), dtype)
        for attention, layout in blueprint.rotary.items()
    }
    inputs = StepInputs(allocate(blueprint.inputs.name, blueprint.inputs))
    sampling = SamplingBatch(
        allocate(blueprint.sampler.name, blueprint.sampler), allocate(blueprint.penalties.name, blueprint.penalties)
    )
    state: StatePool | None = None
    if geometry.hybrid:
        slots = allocate(blueprint.state.name, blueprint.state)
        state = StatePool(geometry, slots, allocate(blueprint.snapshots.name, blueprint.snapshots))
        state.clear(range(capacity.step_rows))  # those that the profile uses; a request clears its own
    with blueprint.family.blamed("the start-up profile of its model", torch.OutOfMemoryError):
        profile = run_profile(
            capacity,
            blueprint.selections,
            model,
            rotary,
            state,
            sampling,
            device,
            blueprint.ledger.line("activations").bytes,
        )
    if capacity.fused_recurrence and not profile.fused_recurrence:
        raise PluginError(
            f"model family {blueprint.family.name!r} says fused_recurrence, and in the start-up profile of model type "
            f"{geometry.model_type!r} a recurrent layer did not go through the kernels of "
            "StepContext.delta_rule_projected: have all of them do so, or leave fused_recurrence out"
        )
    owners = {}
    for plan in capacity.plans:
        path = blueprint.selections[plan.attention].path
        buffers = allocate(f"plan {plan.attention.label}", blueprint.plans[plan.attention])
        owners[plan.attention] = path.bind(plan, buffers)
    pages = blueprint.ledger.kv_pages
    cache = KvCache(geometry, limits.page_size, allocate(KV_LINE, blueprint.kv(pages)))
    pool = PagePool(pages)
    prefix: PrefixCache | None = None
    if blueprint.prefix_cache:
        snapshots = SlotPool(blueprint.snapshot_count, "snapshot") if geometry.hybrid else None
        prefix = PrefixCache(pool, limits.page_size, blueprint.prefix_grain_tokens, snapshots)
    capabilities = blueprint.family.capabilities
    scheduler = Scheduler(
        limits,
        pool,
        SlotPool(limits.max_requests),
        prefix=prefix,
        recurrent=geometry.hybrid,
        chunked_prefill=capabilities.chunked_prefill,
        mixed_steps=capabilities.mixed_steps,
        cuts_inside=capacity.fused_recurrence,
        grid_tokens=blueprint.prefill_grid_tokens,
    )
    return Engine(
        blueprint=blueprint,
        model=model,
        owners=owners,
        rotary=rotary,
        cache=cache,
        state=state,
        inputs=inputs,
        sampling=sampling,
        scheduler=scheduler,
        owned=owned,
        end_token_ids=end_token_ids,
        seed=seed,
    )
