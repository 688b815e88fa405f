"""Layouts and the ledger: what is reserved is what is allocated, and no less than what is used."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from trivet.attention.batch import StepBatch
from trivet.attention.protocol import DecodePath, PlanOwner
from trivet.capacity import PlanCapacity
from trivet.conformance.batches import batch_of, drawn_capacities, worst_lengths
from trivet.conformance.bench import Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.failure import broken, expect
from trivet.conformance.origin import origin
from trivet.dtypes import as_torch
from trivet.errors import CapacityExceeded, TrivetError
from trivet.layout import BufferSpec

UNTOUCHED = 77


@check(
    "layout.allocated-as-reserved/1",
    "protocol",
    "Behind every owned line of the ledger stand live buffers of exactly its bytes: buffer by buffer, in length and "
    "dtype, each in a storage of its own, as the layout says.",
    cause="a buffer is allocated from another layout than the one that was counted",
)
def allocated_as_reserved(bench: Bench) -> Measured:
    total = 0
    for tiny, dtype in itertools.product(bench.tinies, ("float32", "bfloat16")):
        with bench.serve(tiny, dtype=dtype) as served:
            engine = served.engine
            pointers: dict[int, str] = {}
            for line in engine.blueprint.ledger.items:
                if not line.owned:
                    continue
                buffers = engine.owned.get(line.name)
                if buffers is None:
                    broken(
                        observed=f"no buffers stand behind ledger line {line.name!r} ({line.bytes} bytes)",
                        expected="the buffers that it reserves memory for",
                        cause="the line is reserved and never allocated, or allocated under another name",
                    )
                for spec in buffers.layout.specs:
                    tensor = buffers[spec.name]
                    found = (tensor.numel(), tensor.dtype, tensor.untyped_storage().nbytes())
                    expected = (spec.elements, as_torch(spec.dtype), spec.bytes)
                    expect(
                        found == expected,
                        observed=f"{line.name}: buffer {spec.name!r} has {found} (elements, dtype, bytes)",
                        expected=f"{expected}, as its layout says",
                        cause="the buffer was replaced or allocated by hand",
                    )
                    if spec.bytes:
                        place = f"{line.name}: {spec.name}"
                        shared = pointers.setdefault(tensor.data_ptr(), place)
                        expect(
                            shared == place,
                            observed=f"{place} and {shared} lie at the same address",
                            expected="a storage of its own for each buffer",
                            cause="two buffers alias one allocation",
                        )
                expect(
                    buffers.storage_bytes == line.bytes,
                    observed=f"{line.name}: {buffers.storage_bytes} bytes are allocated",
                    expected=f"{line.bytes} bytes, as the ledger reserves",
                    cause="the reserve is computed from another layout, capacity or page count than the allocation",
                )
                total += line.bytes
            counted = served.runtime._meter.allocated_bytes
            if bench.device == "cpu":
                owned = sum(line.bytes for line in engine.blueprint.ledger.items if line.owned)
                expect(
                    counted == owned,
                    observed=f"{counted} bytes were allocated through layouts while loading",
                    expected=f"{owned} bytes, the owned lines of the ledger",
                    cause="something is allocated that no line reserves, or twice",
                )
    return {"bytes": float(total)}


def bound_owner(bench: Bench, path: DecodePath, capacity: PlanCapacity) -> PlanOwner:
    """An owner over buffers of its own; `Broken` if the path cannot make one."""
    try:
        return path.bind(capacity, path.layout(capacity).allocate(bench.device))
    except Exception as error:
        broken(
            observed=f"path {path.name!r} under {capacity.limits}: layout or bind raises {type(error).__name__}: "
            f"{error}, raised at {_place(error, path)}",
            expected="an owner over the buffers of the layout",
            cause="layout states a buffer that cannot be, or bind does not take what layout states; every check of "
            "plans meets this first",
        )


def _place(error: Exception, path: DecodePath) -> str:
    return origin(error, (type(path).__module__.partition(".")[0],))


@check(
    "layout.worst-step-fits-exactly/1",
    "protocol",
    "A plan's buffers hold the worst step that the capacity allows, in every dimension, and its index buffers are no "
    "longer than that: with one element fewer, an update raises CapacityExceeded and writes nothing.",
    cause="a buffer's length in the layout does not follow its dimension of the capacity",
)
def worst_step_fits_exactly(bench: Bench) -> Measured:
    rng = bench.rng("worst")
    tried = 0
    for attention in bench.tiny().geometry.attention_geometries:
        for path in bench.usable_paths(attention):
            for capacity in drawn_capacities(rng, bench, path, attention):
                batches = [batch_of(capacity, *lengths) for lengths in worst_lengths(capacity)]
                for batch in batches:
                    owner = bound_owner(bench, path, capacity)
                    try:
                        owner.update(batch)
                    except Exception as error:
                        broken(
                            observed=f"path {path.name!r} under {capacity.limits}: a step of query lengths "
                            f"{batch.query_lengths.tolist()} and contexts {batch.kv_lengths.tolist()}: "
                            f"{type(error).__name__}: {error}, raised at {_place(error, path)}",
                            expected="an update: the step is within the capacity",
                            cause="a buffer is shorter than the worst step, or a dimension is bounded too low"
                            if isinstance(error, TrivetError)
                            else "update raises for a step within the capacity",
                        )
                    finally:
                        owner.close()
                for spec in path.layout(capacity).specs:
                    if not spec.pinned and spec.dtype.startswith("int"):
                        tried += 1
                        _require_needed(bench, path, capacity, spec, batches)
    return {"buffers_shortened": float(tried)}


def _require_needed(
    bench: Bench, path: DecodePath, capacity: PlanCapacity, spec: BufferSpec, batches: Sequence[StepBatch]
) -> None:
    """`Broken` unless the worst batches need `spec` to its last element, and are refused cleanly without it."""
    refused = False
    for batch in batches:
        shorter = path.layout(capacity).with_elements(spec.name, spec.elements - 1)
        buffers = shorter.allocate(bench.device)
        for other in shorter.specs:
            buffers[other.name].fill_(UNTOUCHED)
        owner = path.bind(capacity, buffers)
        before = {other.name: buffers[other.name].clone() for other in shorter.specs}
        try:
            owner.update(batch)
        except CapacityExceeded:
            refused = True
            written = [name for name, held in before.items() if not torch.equal(held, buffers[name])]
            expect(
                not written,
                observed=f"path {path.name!r}: an update that was refused for {spec.name!r} has written {written}",
                expected="the plan unchanged",
                cause="update writes one buffer before it has looked at the next; compare all of them, then write",
            )
        except Exception as error:
            broken(
                observed=f"path {path.name!r}: with one element fewer in {spec.name!r}, update raises "
                f"{type(error).__name__}: {error}",
                expected="CapacityExceeded that names the buffer",
                cause="update writes before it compares what it writes with the buffer's length",
            )
        finally:
            owner.close()
    expect(
        refused,
        observed=f"path {path.name!r} under {capacity.limits}: buffer {spec.name!r} has {spec.elements} elements, and "
        f"the worst step fits into {spec.elements - 1}",
        expected="a length that the worst step needs to the last element",
        cause=f"the layout states a longer {spec.name!r} than the capacity asks for (a length off by one, or another "
        "dimension), or update does not compare it with the buffer",
    )


CHECKS = (allocated_as_reserved, worst_step_fits_exactly)

ALONE = (worst_step_fits_exactly,)
"""Those that ask a decode path alone, by capacity and geometry, without a model."""
