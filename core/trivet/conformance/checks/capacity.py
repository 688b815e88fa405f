"""Plan capacity: computed once from config and limits, monotonic, checked, and the same object everywhere."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import attrs

from trivet.capacity import Limits, PlanCapacity
from trivet.checked import INT32_MAX, ceil_div
from trivet.conformance.bench import LIMITS, Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.failure import broken, expect
from trivet.conformance.twins import watched
from trivet.errors import CapacityExceeded, MemoryBudgetError
from trivet.reservation import KV_LINE
from trivet.runtime.blueprint import Blueprint

REFUSAL_SECONDS = 5.0
GROWING = ("max_requests", "max_step_tokens", "max_context")


def dimensions(capacity: PlanCapacity) -> dict[str, int]:
    """The sizes of a plan by name."""
    values = {field.name: getattr(capacity, field.name) for field in attrs.fields(PlanCapacity)}
    return {name: value for name, value in values.items() if isinstance(value, int)}


def sizes(blueprint: Blueprint) -> dict[str, int]:
    """Every dimension and every ledger line but the pages, which take what is left."""
    found = {}
    for plan in blueprint.capacity.plans:
        found.update({f"{plan.attention.label} {name}": value for name, value in dimensions(plan).items()})
    found.update({f"{line.name} bytes": line.bytes for line in blueprint.ledger.items if line.name != KV_LINE})
    for name in ("step_tokens", "step_rows", "logit_rows"):
        found[name] = getattr(blueprint.capacity, name)
    return found


def _drawn_limits(bench: Bench, label: str, count: int) -> list[Limits]:
    rng = bench.rng(label)
    return [
        Limits(
            max_requests=int(rng.integers(1, 40)),
            max_step_tokens=int(rng.integers(1, 300)),
            max_context=int(rng.integers(1, 400)),
            page_size=int(rng.choice([1, 3, 16, 64])),
        )
        for _ in range(count)
    ]


@check(
    "capacity.pure/1",
    "protocol",
    "The same config, limits and device give the same dimensions and the same ledger, whatever was planned before.",
    cause="a capacity, layout or scratch bound depends on something beside its arguments",
)
def pure(bench: Bench) -> None:
    drawn = _drawn_limits(bench, "pure", 4)
    first = [sizes(bench.blueprint(limits=limits)) for limits in drawn]
    again = [sizes(bench.blueprint(limits=limits)) for limits in reversed(drawn)][::-1]
    for limits, one, other in zip(drawn, first, again, strict=True):
        changed = {name: (one[name], other.get(name)) for name in one if one[name] != other.get(name)}
        expect(
            not changed,
            observed=f"planned twice under {limits}: {changed}",
            expected="equal sizes",
            cause="a size is derived from state that an earlier plan left",
        )


@check(
    "capacity.monotonic/1",
    "protocol",
    "Raising max_requests, max_step_tokens or max_context lowers no dimension and no ledger line.",
    cause="a size falls where a limit rises",
)
def monotonic(bench: Bench) -> None:
    for limits in _drawn_limits(bench, "monotonic", 4):
        before = sizes(bench.blueprint(limits=limits))
        for name in GROWING:
            for factor in (2, 5):
                raised = attrs.evolve(limits, **{name: getattr(limits, name) * factor})
                after = sizes(bench.blueprint(limits=raised))
                fallen = {what: (before[what], after[what]) for what in before if after[what] < before[what]}
                expect(
                    not fallen,
                    observed=f"{limits} with {name} raised to {getattr(raised, name)}: {fallen} (before, after)",
                    expected="every dimension and every line at least as large as before",
                    cause="a size is computed from another limit than the one that bounds it, or from what remains of "
                    "a budget",
                )


@check(
    "capacity.logical-pages/1",
    "protocol",
    "A plan has room for max_requests * ceil(max_context / page_size) page entries, whatever the pool holds: requests "
    "that share a prefix list the same page many times.",
    cause="page entries are bounded by something else than the limits",
)
def logical_pages(bench: Bench) -> None:
    for limits in _drawn_limits(bench, "logical", 4):
        for kv_pages in (None, 1, 3):
            blueprint = bench.blueprint(limits=limits, kv_pages=kv_pages)
            for plan in blueprint.capacity.plans:
                expected = {
                    "requests": limits.max_requests,
                    "positions": limits.max_context,
                    "pages_per_request": ceil_div(limits.max_context, limits.page_size),
                    "pages": limits.max_requests * ceil_div(limits.max_context, limits.page_size),
                    "tokens": min(limits.max_step_tokens, limits.max_requests * limits.max_context),
                }
                found = {name: getattr(plan, name) for name in expected}
                expect(
                    found == expected,
                    observed=f"under {limits} with kv_pages={kv_pages}: {found}",
                    expected=f"{expected}",
                    cause="a dimension of the plan is bounded by the physical pages of the pool (kv_pages) or by "
                    "another limit than its own",
                )


@check(
    "capacity.int32/1",
    "protocol",
    "Limits whose products leave int32 end in CapacityExceeded with dimension, request and bound, before anything is "
    "allocated.",
    cause="a product of limits is not checked against int32",
)
def int32(bench: Bench) -> None:
    memory = 2**62
    for limits, dimensions_past in (
        (Limits(2**20, 16, 2**20, 1), {"pages"}),
        (Limits(2**16, 64, 2**16, 1), {"pages"}),
        (Limits(2**16, 2**31 - 1, 2**16, 2**16), {"tiles", "query_tiles"}),
    ):
        started = time.perf_counter()
        try:
            blueprint = bench.blueprint(limits=limits, device_memory_bytes=memory)
        except CapacityExceeded as error:
            expect(
                error.dimension in dimensions_past or len(dimensions_past) > 1,
                observed=f"{limits} is refused for dimension {error.dimension!r}",
                expected=f"the dimension that is too large: one of {sorted(dimensions_past)}",
                cause="the error names another dimension than the one that leaves int32",
            )
            expect(
                error.requested > error.bound >= INT32_MAX,
                observed=f"requested {error.requested}, bound {error.bound}",
                expected=f"a request beyond the bound of {INT32_MAX}",
                cause="the numbers in the error are not those that were compared",
            )
        except MemoryBudgetError:
            continue
        else:
            plans = [dimensions(plan) for plan in blueprint.capacity.plans]
            if "pages" in dimensions_past and plans:
                broken(
                    observed=f"{limits} was planned, with {plans}",
                    expected=f"CapacityExceeded: {limits.logical_pages} page entries are more than {INT32_MAX}",
                    cause="the product of max_requests and pages per request is not checked, or not the one that sizes "
                    "the plan",
                )
        expect(
            time.perf_counter() - started < REFUSAL_SECONDS,
            observed=f"refusing {limits} took {time.perf_counter() - started:.1f} s",
            expected=f"less than {REFUSAL_SECONDS:g} s",
            cause="something of the refused size is made before it is refused",
        )


@check(
    "capacity.over-budget/1",
    "protocol",
    "Limits or kv_pages that the memory does not hold end in MemoryBudgetError with the whole ledger, before anything "
    "is allocated.",
    cause="the budget is not held against the ledger",
)
def over_budget(bench: Bench) -> None:
    fits = bench.blueprint(snapshot_bytes=0)  # snapshots take what there is; everything else is needed
    needed = fits.ledger.total_bytes - fits.ledger.line(KV_LINE).bytes
    for what, options in (
        ("a device of 64 KiB", {"device_memory_bytes": 65536}),
        ("a device that lacks one byte", {"device_memory_bytes": needed, "memory_fraction": 1.0}),
        ("10 million pages", {"kv_pages": 10**7, "device_memory_bytes": 10**9}),
    ):
        try:
            bench.blueprint(snapshot_bytes=0, **options)
        except MemoryBudgetError as error:
            lost = [line.name for line in fits.ledger.items if line.name not in str(error)]
            expect(
                not lost,
                observed=f"the error for {what} does not list {lost}",
                expected="every line of the ledger",
                cause="the message is made from another ledger than the one that was refused",
            )
        else:
            broken(
                observed=f"{what} was planned",
                expected="MemoryBudgetError",
                cause="a line is missing from the total that is held against the budget",
            )
    from trivet.layout.buffers import Buffers

    with mock.patch.object(Buffers, "allocate", side_effect=AssertionError("allocated")):
        try:
            bench.serve(kv_pages=10**9).close()
        except (MemoryBudgetError, CapacityExceeded):
            return
        except AssertionError:
            broken(
                observed="loading with a thousand million pages allocated a buffer",
                expected="MemoryBudgetError before the first allocation",
                cause="the load allocates before its blueprint is complete",
            )
    broken(
        observed="a runtime with a thousand million pages was loaded",
        expected="MemoryBudgetError",
        cause="kv_pages is not held against the budget",
    )


@check(
    "capacity.one-object/1",
    "protocol",
    "One capacity object sizes the profile, the reserve, the allocation, the owners and admission: the same object, "
    "not an equal one.",
    cause="a capacity is made anew where the one at hand should be passed on",
)
def one_object(bench: Bench) -> Measured:
    family, log = watched(bench.family)
    limits = attrs.evolve(LIMITS, max_requests=3, max_step_tokens=LIMITS.max_context)
    with bench.serve(family=family, limits=limits) as served:
        engine = served.engine
        blueprint = engine.blueprint
        for plan in blueprint.capacity.plans:
            given = [(where, c) for where, c in log.capacities if c.attention == plan.attention]
            strangers = sorted({where for where, capacity in given if capacity is not plan})
            calls = [where for where, _ in given]
            expect(
                not strangers and {"layout", "scratch_bytes", "bind"} <= set(calls),
                observed=f"{strangers or 'none'} of the calls {calls} were given another capacity than the plan's",
                expected="the blueprint's own object in layout, scratch_bytes and bind",
                cause="the profile, the reserve or the serving allocation derives its capacity again",
            )
            expect(
                engine.owners[plan.attention].capacity is plan,
                observed="the serving owner holds another capacity",
                expected="the object that the reserve was made from",
                cause="the owner or its path makes a capacity of its own in bind",
            )
            reserved, bound = blueprint.plans[plan.attention], engine.owners[plan.attention].buffers.layout
            expect(
                reserved == bound,
                observed=f"reserved: {_shown(reserved)}; bound: {_shown(bound)}",
                expected="the layout that the ledger's line was read off",
                cause="the buffers of the plan were allocated from other sizes than the reserve",
            )
        scheduler = engine.scheduler
        for what, held in (
            ("the capacity", blueprint.capacity.limits),
            ("the scheduler", scheduler.limits),
            ("admission", scheduler.gate.limits),
        ):
            expect(
                held is limits,
                observed=f"{what} holds {held}",
                expected=f"the very limits that the operator gave: {limits}",
                cause=f"{what} is given limits that were made or changed on the way",
            )
    return {"binds": float(len(log.bound))}


def _shown(layout: Any) -> str:
    return ", ".join(f"{spec.name} {spec.elements} {spec.dtype}" for spec in layout.specs)


CHECKS = (pure, monotonic, logical_pages, int32, over_budget, one_object)
