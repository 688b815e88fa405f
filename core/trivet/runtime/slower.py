"""What is served more slowly on a CUDA device of this machine than it could be: what is missing, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trivet.attention import Selection
from trivet.attention.reference.path import REFERENCE
from trivet.capacity import RuntimeCapacity
from trivet.capacity.fused import FUSED_DTYPES, fused_kernels_missing
from trivet.geometry import AttentionGeometry
from trivet.installed import untested_triton
from trivet.runtime.options import SizingOptions


def slower_parts(
    capacity: RuntimeCapacity,
    selections: Mapping[AttentionGeometry, Selection],
    options: SizingOptions,
    recurrence_missing: str | None,
) -> Iterator[str]:
    """A sentence for each part. None for a device that is not here, and none for what the options ask for.

    Args:
        recurrence_missing: why recurrent layers are not served by fused kernels alone; None if they are, or there are
            none.
    """
    if not capacity.device.present:
        return
    if capacity.dtype not in FUSED_DTYPES:
        if options.dtype is None:
            yield (
                f"the checkpoint is in {capacity.dtype}, in which layers run on torch's operations and attention on "
                f"what takes it, which is slower: dtype='{FUSED_DTYPES[0]}' is what kernels are for"
            )
        return
    layers_missing = fused_kernels_missing(capacity.device, capacity.dtype)
    if layers_missing is not None:
        yield f"layers run on torch's operations, which are slower: {layers_missing}"
    elif (untested := untested_triton()) is not None:
        yield untested
    if recurrence_missing is not None and recurrence_missing != layers_missing:
        yield f"recurrent layers run on torch's operations, which are slower: {recurrence_missing}"
    if options.attention is None:
        for attention, selection in selections.items():
            if selection.path.name == REFERENCE:
                yield (
                    f"attention {attention.label} runs on the reference backend, which is slower: "
                    f"{_refusals(selection)}; attention={REFERENCE!r} says that this is meant"
                )
    if options.cuda_graphs and options.attention != REFERENCE and not capacity.graph_buckets:
        paths = sorted({selection.path.name for selection in selections.values() if not selection.captures})
        yield (
            "decode steps are launched kernel by kernel, which costs host time in each, since CUDA graphs do not hold "
            f"decode path {', '.join(paths)}: let another path serve, or say cuda_graphs=False"
        )


def _refusals(selection: Selection) -> str:
    """Why no other path serves, each reason once."""
    names: dict[str, list[str]] = {}
    for name, verdict in selection.verdicts:
        if not verdict.ok:
            names.setdefault(verdict.reason, []).append(name)
    told = "; ".join(f"{', '.join(refused)}: {reason}" for reason, refused in names.items())
    return told or "there is no other path before it"
