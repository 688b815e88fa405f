"""Plan owners: refilled in place, at stable addresses, with named errors; and the decode paths that bind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import torch

from trivet.attention.batch import StepBatch
from trivet.attention.protocol import DecodePath, PathRequest, PlanOwner, Replan, Verdict
from trivet.capacity import DeviceProfile, Limits, PlanCapacity
from trivet.capacity.chunks import DEVICE_CHUNK_TOKENS
from trivet.conformance.batches import NEAR, Contexts, batch_of, drawn_batch, drawn_capacities
from trivet.conformance.bench import LIMITS, Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.checks.layout import bound_owner
from trivet.conformance.failure import broken, expect
from trivet.conformance.origin import origin
from trivet.conformance.served import said
from trivet.conformance.storages import NewStorages, storages_within
from trivet.conformance.twins import RefusingPath, watched
from trivet.dtypes import SERVED
from trivet.errors import CapacityExceeded, ConfigError, RuntimeDown, TrivetError
from trivet.geometry import AttentionGeometry
from trivet.sampling.params import Sampling

UPDATES = 40


def _geometries(bench: Bench) -> list[AttentionGeometry]:
    return list(dict.fromkeys(a for tiny in bench.tinies for a in tiny.geometry.attention_geometries))


def _owners(bench: Bench, rng: np.random.Generator) -> Iterator[tuple[DecodePath, PlanCapacity, PlanOwner]]:
    """An owner for each attention geometry, usable path and drawn capacity; closed afterwards."""
    for attention in _geometries(bench):
        for path in bench.usable_paths(attention):
            for capacity in drawn_capacities(rng, bench, path, attention):
                owner = bound_owner(bench, path, capacity)
                try:
                    yield path, capacity, owner
                finally:
                    owner.close()


def _updated(owner: PlanOwner, batch: StepBatch, path: DecodePath) -> None:
    try:
        done = owner.update(batch)
    except Exception as error:
        place = origin(error, (type(path).__module__.partition(".")[0],))
        broken(
            observed=f"path {path.name!r}: update of query lengths {batch.query_lengths.tolist()} and contexts "
            f"{batch.kv_lengths.tolist()} raises {type(error).__name__}: {error}, raised at {place}",
            expected="an update: the batch is within the capacity",
            cause="a dimension is checked against the wrong bound"
            if isinstance(error, TrivetError)
            else "update reads past the end of what the batch holds, or past a buffer, for a step of this shape",
        )
    expect(
        isinstance(done, Replan),
        observed=f"path {path.name!r}: update returned {done!r}",
        expected="Replan.KEPT or Replan.REPLANNED",
        cause="update does not say what it did",
    )


@check(
    "plan.no-allocation/1",
    "protocol",
    "PlanOwner.update allocates no device memory, whatever the shape of the step.",
    cause="update makes tensors instead of refilling the buffers",
)
def no_allocation(bench: Bench) -> Measured:
    rng = bench.rng("no-allocation")
    updates = 0
    for path, capacity, owner in _owners(bench, rng):
        for _ in range(UPDATES // 4):
            batch = drawn_batch(rng, capacity)
            known = storages_within(owner) | {
                owner.buffers[spec.name].untyped_storage().data_ptr() for spec in owner.buffers.layout.specs
            }
            watch, before = NewStorages(known), _allocations(bench)
            with watch:
                _updated(owner, batch, path)
            found = len(watch.found) or _allocations(bench) - before
            updates += 1
            expect(
                not found,
                observed=f"path {path.name!r}: update allocated {found} times"
                + (f": {', '.join(watch.found[:3])}" if watch.found else ", by the count of the device's allocator"),
                expected="no new tensor: values copied into the buffers that were bound",
                cause="a temporary is made on the device, or a buffer is replaced by a new one; fill it with copy_",
            )
    return {"updates": float(updates)}


def _allocations(bench: Bench) -> int:
    """Allocations on a CUDA device so far, those of libraries through torch's allocator too; 0 on a CPU."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"]) if bench.device == "cuda" else 0


@check(
    "plan.pointers-stable/1",
    "protocol",
    "The addresses of a plan's buffers do not change between binding and close, over any sequence of shapes, and the "
    "plan is held in them alone: what becomes of a batch's arrays after the update changes nothing.",
    cause="update replaces a buffer",
)
def pointers_stable(bench: Bench) -> Measured:
    rng = bench.rng("pointers")
    generator = torch.Generator().manual_seed(bench.seed)
    updates = 0
    for path, capacity, owner in _owners(bench, rng):
        before = owner.buffers.pointers()
        long = capacity.positions > 1000
        for turn in range(UPDATES // 8 if long else UPDATES):
            batch = drawn_batch(rng, capacity)
            _updated(owner, batch, path)
            if turn % 10 == 0 and not long:
                contexts = Contexts.drawn(capacity, batch, generator, bench.device)
                owner.append(*contexts.new(batch), contexts.cache_keys, contexts.cache_values)
                query = contexts.query(capacity, batch, generator)
                owner.attend(query, contexts.cache_keys, contexts.cache_values)
                _require_own(path, owner, batch, contexts, query, NEAR[bench.dtype])
            updates += 1
            after = owner.buffers.pointers()
            moved = [name for name in before if after.get(name) != before[name]]
            expect(
                not moved and after.keys() == before.keys(),
                observed=f"path {path.name!r}: after {turn + 1} updates {moved or sorted(after)} lie elsewhere",
                expected="the addresses at binding: a captured CUDA graph goes on reading them",
                cause="update assigns a new tensor to a buffer, or swaps two",
            )
    return {"updates": float(updates)}


def _require_own(
    path: DecodePath, owner: PlanOwner, batch: StepBatch, contexts: Contexts, query: torch.Tensor, near: float
) -> None:
    """`Broken` if the plan depends on the arrays of a batch once it has been updated from them."""

    def attended(lent: StepBatch, *, spoil: bool) -> torch.Tensor:
        _updated(owner, lent, path)
        if spoil:
            for array in (lent.query_lengths, lent.kv_lengths, lent.page_indptr):
                array.fill(0)
            lent.page_indices.fill(contexts.cache_keys.shape[0] - 1)  # holds nothing but NaN
        keys, values = contexts.cache_keys.clone(), contexts.cache_values.clone()
        owner.append(new_keys, new_values, keys, values)
        return owner.attend(query, keys, values)

    new_keys, new_values = contexts.new(batch)
    arrays = ("query_lengths", "kv_lengths", "page_indptr", "page_indices")
    copied = attrs.evolve(batch, **{name: getattr(batch, name).copy() for name in arrays})
    expected = attended(batch, spoil=False)
    if not torch.allclose(expected.cpu().double(), contexts.attended(batch, query), rtol=near, atol=near):
        return  # what is wrong anyway, other checks name
    try:
        found: object = attended(copied, spoil=True)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    expect(
        isinstance(found, torch.Tensor) and torch.allclose(found, expected, equal_nan=True),
        observed=f"path {path.name!r}: once the arrays of the batch are overwritten, after update, append and attend "
        + (f"raise {found}" if isinstance(found, str) else "give another result"),
        expected="the same result: the arrays are the caller's, the buffers are the plan's",
        cause="the owner keeps an array of the batch, whose memory np.asarray and torch.from_numpy share, and appends "
        "or attends by it: copy what it needs into buffers of the layout",
    )


@check(
    "plan.positions/1",
    "protocol",
    "After an update the plan's positions are, row by row, those of the tokens that the row computes: they continue "
    "where its context ended, also where that came from the prefix cache. They lie in the plan's own buffers.",
    cause="positions are counted from the start of the step",
)
def positions(bench: Bench) -> None:
    rng = bench.rng("positions")
    for path, capacity, owner in _owners(bench, rng):
        for _ in range(6):
            batch = drawn_batch(rng, capacity)
            _updated(owner, batch, path)
            expected = [
                position
                for count, length in zip(batch.query_lengths.tolist(), batch.kv_lengths.tolist(), strict=True)
                for position in range(length - count, length)
            ]
            held = owner.positions
            found = held.tolist()
            expect(
                found == expected,
                observed=f"path {path.name!r}, query lengths {batch.query_lengths.tolist()}, contexts "
                f"{batch.kv_lengths.tolist()}: positions {found[:24]}",
                expected=f"{expected[:24]}",
                cause="a row's first position is not its context less what it computes: a chunk or a warm start would "
                "be rotated as if it began at 0",
            )
            names = [spec.name for spec in owner.buffers.layout.specs]
            inside = held.untyped_storage().data_ptr() in {
                owner.buffers[name].untyped_storage().data_ptr() for name in names
            }
            expect(
                inside and held.dtype == torch.int32,
                observed=f"path {path.name!r}: positions is a tensor of {held.dtype}"
                + ("" if inside else " that lies in none of the plan's buffers"),
                expected=f"the front of an int32 buffer of the layout, one of {names}",
                cause="update makes a tensor of its own for the positions, which no ledger counts and a captured CUDA "
                "graph does not see: state a buffer for them in layout, fill it in update and return its front",
            )


@check(
    "plan.refuses-what-is-too-large/1",
    "protocol",
    "A batch that is one larger than the capacity in any dimension raises CapacityExceeded with the dimension, the "
    "request and the bound, and leaves the plan as it was.",
    cause="a dimension is not checked before the buffers are filled",
)
def refuses_what_is_too_large(bench: Bench) -> Measured:
    refused = 0
    for attention in _geometries(bench):
        for path in bench.usable_paths(attention):
            capacity = bench.plan_capacity(path, attention, Limits(2, 8, 12, 4))
            for dimension, batch in _too_large(capacity):
                owner = bound_owner(bench, path, capacity)
                _updated(owner, batch_of(capacity, [2, 1], [7, 3]), path)
                held = {spec.name: owner.buffers[spec.name].clone() for spec in owner.buffers.layout.specs}
                try:
                    owner.update(batch)
                except CapacityExceeded as error:
                    expect(
                        error.dimension == dimension and error.requested == error.bound + 1,
                        observed=f"path {path.name!r}, one past {dimension!r}: {error}",
                        expected=f"CapacityExceeded in {dimension!r}, the request one more than the bound",
                        cause="another dimension is checked first, against a bound that is too low, or the error "
                        "carries other numbers than were compared",
                    )
                except Exception as error:
                    broken(
                        observed=f"path {path.name!r}, one past {dimension!r}: {type(error).__name__}: {error}",
                        expected=f"CapacityExceeded in {dimension!r}",
                        cause="the batch reaches the buffers unchecked: call check_batch, or compare each dimension "
                        "before anything is written",
                    )
                else:
                    broken(
                        observed=f"path {path.name!r}: a batch one past {dimension!r} was planned",
                        expected=f"CapacityExceeded in {dimension!r}",
                        cause="update does not check this dimension, or makes a larger plan instead of refusing",
                    )
                changed = [name for name, before in held.items() if not torch.equal(before, owner.buffers[name])]
                expect(
                    not changed,
                    observed=f"path {path.name!r}: the refused batch has changed {changed}",
                    expected="the plan as it was",
                    cause="buffers are written before every dimension has been checked",
                )
                owner.close()
                refused += 1
    return {"batches_refused": float(refused)}


def _too_large(capacity: PlanCapacity) -> Iterator[tuple[str, StepBatch]]:
    full = batch_of(capacity, [1, 1], [12, 12])
    yield "requests", batch_of(capacity, [1, 1, 1], [1, 1, 1])
    yield "tokens", batch_of(capacity, [5, 4], [5, 4])
    yield "positions", batch_of(capacity, [1], [13])
    yield "pages_per_request", attrs.evolve(full, page_indptr=[0, 4, 7], page_indices=list(range(7)))
    yield "pages", attrs.evolve(full, page_indices=list(range(7)))
    yield "indptr", attrs.evolve(full, page_indptr=[0, 3, 6, 6])
    yield "query_heads", attrs.evolve(full, query_heads=capacity.query_heads + 1)
    yield "kv_heads", attrs.evolve(full, kv_heads=capacity.kv_heads + 1)


@check(
    "plan.refuses-contradictions/1",
    "protocol",
    "Page lists that do not fit the contexts' lengths, and rows that compute more than their context holds, raise "
    "ConfigError.",
    cause="a batch is planned without being checked against itself",
)
def refuses_contradictions(bench: Bench) -> None:
    for attention in bench.tiny().geometry.attention_geometries:
        for path in bench.usable_paths(attention):
            capacity = bench.plan_capacity(path, attention, Limits(2, 8, 12, 4))
            good = batch_of(capacity, [1], [9])
            for what, batch in (
                ("two pages for a context of three", attrs.evolve(good, page_indices=[0, 1], page_indptr=[0, 2])),
                ("more new tokens than context", attrs.evolve(good, query_lengths=[4], kv_lengths=[3])),
                ("page pointers that end early", attrs.evolve(good, page_indptr=[0, 2])),
            ):
                owner = bound_owner(bench, path, capacity)
                try:
                    owner.update(batch)
                except ConfigError:
                    continue
                except Exception as error:
                    broken(
                        observed=f"path {path.name!r}: {what}: {type(error).__name__}: {error}",
                        expected="ConfigError",
                        cause="the batch is not checked before it is used",
                    )
                finally:
                    owner.close()
                broken(
                    observed=f"path {path.name!r}: a batch with {what} was planned",
                    expected="ConfigError",
                    cause="attention would read pages that the row does not list",
                )


@check(
    "plan.closed-owner/1",
    "protocol",
    "close releases an owner's buffers and may be called twice; a later update raises RuntimeDown.",
    cause="a closed owner keeps its buffers or goes on serving",
)
def closed_owner(bench: Bench) -> None:
    rng = bench.rng("closed")
    for path, capacity, owner in _owners(bench, rng):
        batch = drawn_batch(rng, capacity)
        _updated(owner, batch, path)
        owner.close()
        owner.close()
        expect(
            owner.buffers.storage_bytes == 0,
            observed=f"path {path.name!r}: {owner.buffers.storage_bytes} bytes are still held after close",
            expected="no buffer",
            cause="close does not close the buffers",
        )
        try:
            owner.update(batch)
        except RuntimeDown:
            continue
        except Exception as error:
            broken(
                observed=f"path {path.name!r}: update after close raises {type(error).__name__}: {error}",
                expected="RuntimeDown",
                cause="a closed owner does not know that it is closed",
            )
        broken(
            observed=f"path {path.name!r}: update after close succeeded",
            expected="RuntimeDown",
            cause="the owner holds tensors beside its buffers",
        )


@check(
    "plan.one-owner-per-lane/1",
    "protocol",
    "A runtime binds one owner for each distinct attention geometry, with buffers that no other owner shares, and "
    "updates each once a step.",
    cause="owners are bound or updated more often than the geometries ask for",
)
def one_owner_per_lane(bench: Bench) -> Measured:
    for tiny in bench.tinies:
        with bench.serve(tiny) as served:
            owners = served.engine.owners
            geometries = tiny.geometry.attention_geometries
            pointers = [set(owner.buffers.pointers().values()) for owner in owners.values()]
            expect(
                tuple(owners) == geometries
                and len({id(owner) for owner in owners.values()}) == len(owners)
                and len(set().union(*pointers)) == sum(map(len, pointers)),
                observed=f"owners of {[a.label for a in owners]}",
                expected=f"an owner with buffers of its own for each of {[a.label for a in geometries]}",
                cause="layers that share a geometry must give equal AttentionGeometry values, others different ones",
            )
            before = served.stats
            served.generate([bench.tokens(bench.rng("lane"), 9, tiny)] * 2)
            after = served.stats
            steps, updates = (after[name] - before[name] for name in ("steps", "plan_updates"))
            expect(
                updates == steps * len(owners),
                observed=f"{updates} plan updates in {steps} steps",
                expected=f"{steps * len(owners)}: each of {len(owners)} owners once a step",
                cause="a step skips an update, or updates an owner for each layer",
            )
    return {"owners": float(len(geometries))}


@check(
    "paths.verdicts/1",
    "protocol",
    "Every decode path answers any request with yes or no and a reason, the same each time, and allocates nothing to "
    "say so.",
    cause="a predicate raises where it should say no",
)
def verdicts(bench: Bench) -> Measured:
    asked = 0
    for attention in bench.tiny().geometry.attention_geometries:
        for path in bench.paths:
            for device in ("cpu", "h200"):
                for dtype in SERVED:
                    for policy in ("tuned", "pinned"):
                        for head_dim in (attention.head_dim, 128, 7):
                            need = PathRequest(
                                attrs.evolve(attention, head_dim=head_dim),
                                DeviceProfile.named(device),
                                dtype,
                                policy,
                                16,
                            )
                            watch = NewStorages(set())
                            with watch:
                                verdict = path.usable(need)
                            asked += 1
                            expect(
                                isinstance(verdict, Verdict)
                                and isinstance(verdict.ok, bool)
                                and bool(verdict.reason.strip())
                                and path.usable(need) == verdict
                                and not watch.found,
                                observed=f"path {path.name!r}, asked for {attention.label} in {dtype} under {policy!r} "
                                f"on {device}: {verdict!r}, tensors made: {watch.found}",
                                expected="a Verdict with a reason, the same when asked again, without a tensor made",
                                cause="the predicate gives no reason, depends on what was asked before, or tries the "
                                "kernel to find out",
                            )
    return {"requests": float(asked)}


@check(
    "paths.verdicts-hold/1",
    "protocol",
    "The first path whose predicate says yes is bound and attends; one that says no is neither bound nor given memory, "
    "and its reason is reported.",
    cause="selection and use of decode paths disagree",
)
def verdicts_hold(bench: Bench) -> None:
    family, log = watched(bench.family, refusing_first=True)
    refusing = family.decode_paths[0].name
    with bench.serve(family=family) as served:
        served.generate([bench.tokens(bench.rng("paths"), 9)])
        blueprint = served.engine.blueprint
        explained = served.runtime.explain_paths()
        for attention, selection in blueprint.selections.items():
            need = PathRequest(attention, bench.profile, blueprint.capacity.dtype, "tuned", 4)
            first = next(path.name for path in bench.family.decode_paths if path.usable(need).ok)
            expect(
                selection.path.name == first and first in explained[attention.label],
                observed=f"{attention.label} is served by {selection.path.name!r}, and reported as "
                f"{explained[attention.label]!r}",
                expected=f"{first!r}, the first path that says yes",
                cause="selection does not ask the paths in the family's order, or ignores what they answer",
            )
            expect(
                (refusing, Verdict(False, RefusingPath.REASON)) in selection.verdicts,
                observed=f"the verdicts kept are {selection.verdicts}",
                expected=f"the refusal of {refusing!r} with its reason",
                cause="a path that says no is dropped without its reason",
            )
        used = {*log.attended, *log.updates, *(name for name, _, _ in log.bound)}
        expect(
            used == {selection.path.name for selection in blueprint.selections.values()} and bool(log.attended),
            observed=f"paths that were bound, updated or attended with: {sorted(used)}; calls: {log.attended}",
            expected="the selected path, and no other",
            cause="the runtime binds another path than it reports, or attends without its owner",
        )
        lines = [line.name for line in served.runtime.memory.items if line.name.startswith("plan ")]
        expect(
            lines == [f"plan {a.label}" for a in blueprint.selections],
            observed=f"ledger lines {lines}",
            expected="one plan line for each attention geometry",
            cause="memory is reserved for a path that is not selected",
        )
    if not blueprint.selections:
        return
    try:
        bench.serve(attention="no-such-backend").close()
    except ConfigError as error:
        expect(
            "no-such-backend" in str(error) and all(path.backend in str(error) for path in bench.family.decode_paths),
            observed=f"ConfigError: {error}",
            expected="the backend asked for, and those that there are",
            cause="the operator is not told which backends can be named",
        )
        return
    broken(
        observed="attention='no-such-backend' was served",
        expected="ConfigError with the backends that there are",
        cause="the backend that the operator names is ignored",
    )


@check(
    "paths.pinned-policy/1",
    "protocol",
    "Under numeric_policy='pinned' a result does not depend on the batch, on chunking or on the prefix cache by a "
    "single bit; where no decode path can promise that, loading is refused with each path's reason.",
    capability="pinned_policy",
    cause="the pinned policy is accepted by a path that does not honour it",
)
def pinned_policy(bench: Bench) -> Measured:
    rng = bench.rng("pinned")
    sampling = Sampling(max_new_tokens=8, logprobs=4)
    # Steps that hold every prompt, and steps in which none of the longer ones goes in at once. Prompts of recurrent
    # layers are cut at whole chunks.
    chunk = DEVICE_CHUNK_TOKENS if bench.hybrid else 1
    longest = 3 * chunk if bench.hybrid else 40
    wide = Limits(4, max(LIMITS.max_step_tokens, 4 + chunk) + chunk, longest + 16, 16 if bench.hybrid else 4)
    narrow = attrs.evolve(wide, max_step_tokens=4 + chunk if bench.hybrid else 7)
    options: dict[str, Any] = {"numeric_policy": "pinned", "snapshot_stride": chunk if bench.hybrid else None}
    prompts = [bench.tokens(rng, int(n)) for n in rng.integers(5, longest, 5)]
    try:
        bench.serve(limits=wide, **options).close()
    except ConfigError as error:
        every_path = all(path.name in str(error) for path in bench.family.decode_paths)
        expect(
            "pinned" in str(error) and (every_path or (bench.hybrid and "recurrent layers" in str(error))),
            observed=f"ConfigError: {error}",
            expected="an error that names the policy, and each path, or the recurrent layers, with the reason",
            cause="the reasons of the candidates are lost",
        )
        return {"served": 0.0}
    answers = []
    for limits, together in ((wide, True), (narrow, True), (wide, False)):
        with bench.serve(limits=limits, **options) as served:
            groups = [prompts] if together else [[prompt] for prompt in prompts]
            answers.append(said([answer for group in groups for answer in served.generate(group, sampling)]))
    expect(
        answers[0] == answers[1] == answers[2],
        observed=f"equal to the batch in steps of {wide.max_step_tokens}: in steps of {narrow.max_step_tokens} "
        f"{answers[0] == answers[1]}, one by one {answers[0] == answers[2]}",
        expected="the same bits",
        cause="a kernel, a split or a chunk boundary depends on what else is in the step",
    )
    return {"served": 1.0}


CHECKS = (
    no_allocation,
    pointers_stable,
    positions,
    refuses_what_is_too_large,
    refuses_contradictions,
    closed_owner,
    one_owner_per_lane,
    verdicts,
    verdicts_hold,
    pinned_policy,
)

ALONE = (
    positions,
    no_allocation,
    pointers_stable,
    refuses_what_is_too_large,
    refuses_contradictions,
    closed_owner,
    verdicts,
)
"""Those that ask a decode path alone, by capacity and geometry, without a model."""
