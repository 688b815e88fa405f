"""Everything about a runtime's sizes, decided from config.json before a byte is allocated. Free of torch.

`plan_memory` stops here; `Runtime.load` goes on and allocates exactly what stands in it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from attrs import evolve, frozen

from trivet import checked
from trivet.attention import PathRequest, Selection, candidates, select_path
from trivet.caches.kv import kv_layout
from trivet.caches.state import PADDING_SLOTS, snapshots_within, state_layout
from trivet.capacity import DeviceProfile, Limits, RuntimeCapacity, TileShape
from trivet.capacity.chunks import DEVICE_CHUNK_TOKENS
from trivet.capacity.fused import chunk_kernels_missing
from trivet.config.document import ConfigDocument
from trivet.errors import CapacityExceeded, ConfigError, PluginError
from trivet.geometry import AttentionGeometry, ModelGeometry
from trivet.layers.rotary_layout import rotary_layout
from trivet.layout import BufferLayout
from trivet.plugin.family import ModelFamily
from trivet.plugin.manager import PluginManager
from trivet.reservation import LedgerLine, MemoryLedger, activation_bytes, check_kv_pages, cuda_lines, reserve
from trivet.runtime.inputs import inputs_layout
from trivet.runtime.options import SizingOptions
from trivet.runtime.slower import slower_parts
from trivet.sampling.layout import penalty_layout, sampler_layout, sampler_scratch_bytes
from trivet.scheduler import check_grid
from trivet.weights.map import WeightMap

logger = logging.getLogger("trivet.blueprint")

Value = TypeVar("Value")

CUDA_SNAPSHOT_STRIDE = 256
SNAPSHOTS_PER_REQUEST = 8
SPARE_SNAPSHOTS = 32
SNAPSHOT_SHARE = 4
"""Snapshots take at most this part (a quarter) of what everything else but KV pages leaves of the budget, unless
`snapshot_bytes` says otherwise."""


@frozen(eq=False)
class Blueprint:
    """The sizes of one runtime.

    Attributes:
        directory: the checkpoint.
        document: its config.json.
        family: the family that serves it.
        geometry: what the model is.
        weight_map: its parameters.
        capacity: the one capacity value.
        selections: the decode path of each attention geometry, with the reasons.
        weights, inputs, sampler, penalties, state, snapshots: layouts of what is held.
        plans: layout of each attention geometry's plan.
        rotary: layout of each attention geometry's rotary table.
        snapshot_count: snapshots that the pool holds; 0 without hybrid prefix caching.
        prefix_grain_tokens: tokens between boundaries at which a prefix-cache hit can end.
        prefill_grid_tokens: at whose multiples prompts are cut; 1 for anywhere.
        prefix_cache: whether there is a prefix cache; of a hybrid model without snapshots, nothing is hit in it.
        ledger: every line, and the KV pages that the budget leaves.
    """

    directory: Path
    document: ConfigDocument
    family: ModelFamily
    geometry: ModelGeometry
    weight_map: WeightMap
    capacity: RuntimeCapacity
    selections: dict[AttentionGeometry, Selection]
    weights: BufferLayout
    inputs: BufferLayout
    sampler: BufferLayout
    penalties: BufferLayout
    state: BufferLayout
    snapshots: BufferLayout
    plans: dict[AttentionGeometry, BufferLayout]
    rotary: dict[AttentionGeometry, BufferLayout]
    snapshot_count: int
    prefix_grain_tokens: int
    prefill_grid_tokens: int
    prefix_cache: bool
    ledger: MemoryLedger

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the ledger's lines that are page-locked host memory, not of the device."""
        held = (self.weights, self.inputs, self.sampler, self.penalties, self.state, self.snapshots)
        layouts = (*held, *self.plans.values(), *self.rotary.values())
        return sum(spec.bytes for layout in layouts for spec in layout.specs if spec.pinned)

    def kv(self, pages: int) -> BufferLayout:
        """Layout of a KV cache with `pages` pages."""
        return kv_layout(self.geometry, self.capacity.limits.page_size, pages, self.capacity.dtype)


def draw_blueprint(directory: Path, options: SizingOptions, device: DeviceProfile, plugins: PluginManager) -> Blueprint:
    """Decide every size.

    Raises:
        ConfigError: config.json or an option holds something that is not served.
        CapacityExceeded: a dimension is larger than kernels can take.
        MemoryBudgetError: the budget does not hold the limits; carries the ledger.
        PluginError: no working plugin serves the checkpoint's model type.
    """
    document = ConfigDocument.read(directory)
    family = plugins.family_for(document.model_type)
    geometry = _given(family, "read_geometry", ModelGeometry, lambda: family.read_geometry(document))
    _require_capabilities(family, geometry, device, options)
    limits = options.limits or Limits.for_device(device.kind, geometry.max_positions)
    if limits.max_context > geometry.max_positions:
        logger.warning(
            "max_context is %d, and the model was made for %d positions (max_position_embeddings): what it says beyond "
            "them may be worth little",
            limits.max_context,
            geometry.max_positions,
        )
    dtype = options.dtype or geometry.dtype
    recurrence_missing = _recurrence_missing(family, geometry, device, dtype, options)
    fused_recurrence = geometry.hybrid and recurrence_missing is None
    selections = _select_paths(family, plugins, geometry, limits, device, dtype, options)
    capacity = RuntimeCapacity.of(
        geometry,
        limits,
        device,
        dtype=dtype,
        tile_of=_tiles(selections),
        numeric_policy=options.numeric_policy,
        graph_buckets=_graph_buckets(limits.step_rows, selections) if _captures(device, options) else (),
        fused_recurrence=fused_recurrence,
    )
    for part in slower_parts(capacity, selections, options, recurrence_missing):
        logger.warning("%s", part)
    grid_tokens = prefill_grid(geometry, options.numeric_policy)
    grain_tokens = prefix_grain(geometry, limits.page_size, device.kind, options.snapshot_stride, grid_tokens)
    check_grid(limits, grain_tokens if options.prefix_cache else grid_tokens, grid_tokens)
    if options.kv_pages is not None:
        check_kv_pages(options.kv_pages)
    budget_bytes = options.budget_bytes(device.memory_bytes)
    weight_map = _given(family, "weight_map", WeightMap, lambda: family.weight_map(geometry))
    layouts = {
        "weights": weight_map.layout(dtype),
        "inputs": inputs_layout(capacity),
        "sampler": sampler_layout(limits.max_requests, geometry.vocab_size),
        "penalties": penalty_layout(limits.max_requests, geometry.vocab_size),
        "state": state_layout("recurrent state", geometry, limits.max_requests + PADDING_SLOTS, dtype),
    }
    plans = {plan.attention: selections[plan.attention].path.layout(plan) for plan in capacity.plans}
    rotary = {attention: rotary_layout(attention.rope, limits.max_context) for attention in plans}
    scratch_bytes = sum(selections[plan.attention].path.scratch_bytes(plan, dtype) for plan in capacity.plans)
    sampling_bytes = sampler_scratch_bytes(capacity.logit_rows, geometry.vocab_size, device.kind)
    activations = LedgerLine(
        "activations",
        activation_bytes(capacity, scratch_bytes, sampling_bytes, grain_tokens),
        f"planned bound for a step of {capacity.step_tokens} tokens",
        owned=False,
        lower="max_step_tokens",
    )
    lines = [
        LedgerLine.of_layout(layouts["weights"]),
        activations,
        *(LedgerLine.of_layout(layout, "max_context", f"plan {a.label}") for a, layout in plans.items()),
        *(LedgerLine.of_layout(layout, "max_context", f"rotary table {a.label}") for a, layout in rotary.items()),
        LedgerLine.of_layout(layouts["inputs"], "max_step_tokens"),
        LedgerLine.of_layout(layouts["sampler"], "max_requests"),
        LedgerLine.of_layout(layouts["penalties"], "max_requests"),
        *cuda_lines(capacity, sampling_bytes),
    ]
    if geometry.hybrid:
        lines.append(_state_line(layouts["state"], limits.max_requests))
    kv_bytes = kv_layout(geometry, limits.page_size, options.kv_pages or 0, dtype).total_bytes
    left_bytes = budget_bytes - checked.sum_bytes("reserves", (kv_bytes, *(line.bytes for line in lines)))
    snapshot_count, whence = 0, ""
    if geometry.hybrid:
        snapshot_count, whence = _snapshot_count(
            geometry, limits, dtype, budget_bytes, left_bytes, options, grain_tokens
        )
    if snapshot_count and not (family.capabilities.chunked_prefill or fused_recurrence):
        raise ConfigError(
            f"prefill stops at snapshot boundaries, and model family {family.name!r} computes prompts whole "
            "(chunked_prefill): serve it with prefix_cache=False"
        )
    layouts["snapshots"] = state_layout("snapshots", geometry, snapshot_count, dtype)
    if geometry.hybrid:
        lines.append(_snapshot_line(layouts["snapshots"], snapshot_count, whence, grain_tokens))
        if options.prefix_cache and not snapshot_count:
            logger.warning("%s", lines[-1].source)
    ledger = reserve(
        lines,
        lambda pages: kv_layout(geometry, limits.page_size, pages, dtype),
        budget_bytes=budget_bytes,
        kv_pages=options.kv_pages,
        most_pages=limits.logical_pages if device.kind == "cpu" or not geometry.attention_layers else None,
    )
    return Blueprint(
        directory=directory,
        document=document,
        family=family,
        geometry=geometry,
        weight_map=weight_map,
        capacity=capacity,
        selections=selections,
        plans=plans,
        rotary=rotary,
        snapshot_count=snapshot_count,
        prefix_grain_tokens=grain_tokens,
        prefill_grid_tokens=grid_tokens,
        prefix_cache=options.prefix_cache,
        ledger=ledger,
        **layouts,
    )


def _given(family: ModelFamily, what: str, kind: type[Value], call: Callable[[], object]) -> Value:
    """What the family's function gives; `PluginError` if that raises or gives anything but a `kind`."""
    with family.blamed(what):
        found = call()
    if not isinstance(found, kind):
        raise PluginError(f"model family {family.name!r}: {what} returned {found!r}, expected a {kind.__name__}")
    return found


def _require_capabilities(
    family: ModelFamily, geometry: ModelGeometry, device: DeviceProfile, options: SizingOptions
) -> None:
    asked = {
        "prefix_cache": options.prefix_cache,
        "tied_embeddings": geometry.tied_embeddings,
        "cuda_graphs": options.cuda_graphs and device.kind == "cuda",
        "pinned_policy": options.numeric_policy == "pinned",
    }
    for capability, wanted in asked.items():
        if wanted:
            family.require(capability)


def _recurrence_missing(
    family: ModelFamily, geometry: ModelGeometry, device: DeviceProfile, dtype: str, options: SizingOptions
) -> str | None:
    """Why recurrent layers are not served by fused kernels alone; None if they are, or there are none.

    Raises:
        ConfigError: there are recurrent layers, they are not, and the pinned policy wants it.
    """
    if not geometry.hybrid:
        return None
    missing = chunk_kernels_missing(device, dtype, geometry.layers)
    if missing is None and not family.fused_recurrence:
        missing = f"model family {family.name!r} does not say that its layers take them (ModelFamily.fused_recurrence)"
    if missing is not None and options.numeric_policy == "pinned":
        raise ConfigError(
            f"numeric_policy='pinned': the {len(geometry.recurrent_layers)} recurrent layers of model type "
            f"{geometry.model_type!r} want the chunk kernels, whose results do not depend on the batch, and these do "
            f"not serve: {missing}; use numeric_policy='tuned'"
        )
    return missing


def _select_paths(
    family: ModelFamily,
    plugins: PluginManager,
    geometry: ModelGeometry,
    limits: Limits,
    device: DeviceProfile,
    dtype: str,
    options: SizingOptions,
) -> dict[AttentionGeometry, Selection]:
    installed = [path for backend in plugins.attention_backends() for path in backend.decode_paths]
    paths = candidates(family.decode_paths, installed)
    return {
        attention: select_path(
            paths,
            PathRequest(attention, device, dtype, options.numeric_policy, limits.page_size, options.attention),
            installed,
        )
        for attention in geometry.attention_geometries
    }


def _captures(device: DeviceProfile, options: SizingOptions) -> bool:
    """Whether decode steps are to be captured in CUDA graphs."""
    return options.cuda_graphs and device.kind == "cuda"


def _graph_buckets(most_rows: int, selections: dict[AttentionGeometry, Selection]) -> tuple[int, ...]:
    """Numbers of decode rows to capture, so that at most a third of a larger step's rows are padding."""
    if not all(selection.captures for selection in selections.values()):
        return ()
    buckets = [rows for rows in (1, 2, 4, 8, 16, 24, 32, 48) if rows < most_rows]
    step = 64
    while buckets and step < most_rows:
        buckets += [rows for rows in (step, step + step // 2) if rows < most_rows]
        step *= 2
    return (*buckets, most_rows)


def _tiles(selections: dict[AttentionGeometry, Selection]) -> Callable[[AttentionGeometry], TileShape]:
    return lambda attention: selections[attention].path.tile(attention)


def prefix_grain(
    geometry: ModelGeometry, page_size: int, device_kind: str, stride: int | None, grid_tokens: int
) -> int:
    """Tokens between boundaries at which a prefix-cache hit can end.

    Args:
        device_kind: ``"cpu"`` or ``"cuda"``.
        stride: `snapshot_stride` as it was given.
        grid_tokens: at whose multiples prompts are cut (`prefill_grid`).

    Raises:
        ConfigError: the stride of a hybrid model is no multiple of the page size.
    """
    if not geometry.hybrid:
        return page_size
    if stride is None:
        least = math.lcm(page_size, grid_tokens)  # a snapshot lies where a page ends, and where prompts are cut
        return least if device_kind == "cpu" else checked.ceil_div(CUDA_SNAPSHOT_STRIDE, least) * least
    if stride % page_size:
        raise ConfigError(
            f"snapshot_stride is {stride}, expected a multiple of page_size {page_size}: a hit ends where both a page "
            "and a snapshot end"
        )
    return stride


def prefill_grid(geometry: ModelGeometry, numeric_policy: str) -> int:
    """At whose multiples prompts are cut: whole chunks of recurrent layers where results must not depend on the batch.

    The same tokens in other chunks, or one by one, give other bits.
    """
    return DEVICE_CHUNK_TOKENS if geometry.hybrid and numeric_policy == "pinned" else 1


def _snapshot_count(
    geometry: ModelGeometry,
    limits: Limits,
    dtype: str,
    budget_bytes: int,
    left_bytes: int,
    options: SizingOptions,
    grain_tokens: int,
) -> tuple[int, str]:
    """How many snapshots the pool of a hybrid model holds, and where the number comes from: of none, why.

    Raises:
        CapacityExceeded: `snapshot_bytes` alone is more than the budget.
    """
    if not options.prefix_cache:
        return 0, "prefix_cache=False"
    if grain_tokens >= limits.max_context:
        return 0, f"snapshots would lie at multiples of {grain_tokens} tokens, and max_context is {limits.max_context}"
    given_bytes = options.snapshot_bytes
    if given_bytes is not None and given_bytes > budget_bytes:
        raise CapacityExceeded(
            "snapshot_bytes", given_bytes, budget_bytes, "snapshots lie within the memory budget: lower snapshot_bytes"
        )
    share_bytes = max(left_bytes, 0) // SNAPSHOT_SHARE if given_bytes is None else given_bytes
    whose = f"1/{SNAPSHOT_SHARE} of what is left of the memory budget" if given_bytes is None else "snapshot_bytes"
    count = snapshots_within(share_bytes, geometry, dtype)
    if not count:
        one_bytes = state_layout("snapshot", geometry, 1, dtype).total_bytes
        return 0, f"{whose} is {share_bytes} bytes, and one snapshot of the recurrent state takes {one_bytes}"
    wanted = SNAPSHOTS_PER_REQUEST * limits.max_requests + SPARE_SNAPSHOTS
    if given_bytes is None and count > wanted:
        return wanted, f"{SNAPSHOTS_PER_REQUEST} for each of {limits.max_requests} requests and {SPARE_SNAPSHOTS} more"
    return count, f"as many as {share_bytes} bytes hold ({whose})"


def _state_line(layout: BufferLayout, max_requests: int) -> LedgerLine:
    slot_bytes = layout.total_bytes // (max_requests + PADDING_SLOTS)
    source = f"{max_requests} slots of {slot_bytes} bytes, and {PADDING_SLOTS * slot_bytes} bytes for padding rows"
    return evolve(LedgerLine.of_layout(layout, "max_requests"), source=source)


def _snapshot_line(layout: BufferLayout, count: int, whence: str, grain_tokens: int) -> LedgerLine:
    source = f"hybrid prefix caching is off: {whence}"
    if count:
        one_bytes = layout.total_bytes // count
        source = f"{count} snapshots of {one_bytes} bytes, {whence}, at multiples of {grain_tokens} tokens"
    return evolve(LedgerLine.of_layout(layout, "snapshot_bytes"), source=source)
