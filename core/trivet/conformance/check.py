"""A conformance check as a value. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from attrs import field, frozen

from trivet.plugin.capabilities import Capabilities

if TYPE_CHECKING:
    from trivet.conformance.bench import Bench

Tier: TypeAlias = Literal["protocol", "numerics", "device", "checkpoint"]
TIERS: tuple[Tier, ...] = get_args(Tier)

Measured: TypeAlias = Mapping[str, float]
"""Numbers that a check measured, by name with their unit."""

Function: TypeAlias = "Callable[[Bench], Measured | None]"

DOCS_PAGE = "sdk_docs/conformance.md"

_ID = re.compile(r"[a-z0-9-]+\.[a-z0-9-]+/\d+")


@frozen(kw_only=True)
class Check:
    """One promise, and the function that tries to break it.

    Attributes:
        id: ``area.promise/version``. Stable: what is checked changes only with the version.
        tier: where it runs: ``protocol`` and ``numerics`` on a CPU, ``device`` on CUDA, ``checkpoint`` with a real
            checkpoint.
        contract: what is promised, in a sentence or two.
        cause: what most probably is wrong where the check meets an exception that it did not foresee.
        run: tries to break the promise: raises `Broken` if it can; returns what it measured.
        capability: the capability that it depends on, which makes it optional: a family may declare that one
            unsupported. None: required of every family.
        recurrent: whether it is about recurrent layers, and applies only to families that have some.
        gate: whether the checks that follow make no sense where it fails.
    """

    id: str
    tier: Tier
    contract: str
    cause: str
    run: Function = field(repr=False)
    capability: str | None = None
    recurrent: bool = False
    gate: bool = False

    def __attrs_post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"check id {self.id!r}: expected 'area.promise/version'")
        if self.tier not in TIERS:
            raise ValueError(f"check {self.id}: tier {self.tier!r}: expected one of {', '.join(TIERS)}")
        if self.capability is not None and self.capability not in Capabilities.names():
            raise ValueError(f"check {self.id}: capability {self.capability!r} is none of {Capabilities.names()}")
        if not self.contract or not self.cause:
            raise ValueError(f"check {self.id}: it has no contract or no cause")

    @property
    def required(self) -> bool:
        """Whether every family must pass it."""
        return self.capability is None

    @property
    def docs(self) -> str:
        """Where the documentation explains it."""
        return f"{DOCS_PAGE}#{self.id.partition('/')[0]}"


def check(
    id: str,
    tier: Tier,
    contract: str,
    *,
    cause: str,
    capability: str | None = None,
    recurrent: bool = False,
    gate: bool = False,
) -> Callable[[Function], Check]:
    """Make a `Check` of the function below it."""

    def make(function: Function) -> Check:
        return Check(
            id=id,
            tier=tier,
            contract=contract,
            cause=cause,
            run=function,
            capability=capability,
            recurrent=recurrent,
            gate=gate,
        )

    return make
