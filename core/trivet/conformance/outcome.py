"""What became of one check, with everything that a stranger needs where it failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import attrs
from attrs import field, frozen

from trivet.conformance.check import Check, Tier

Status: TypeAlias = Literal["passed", "failed", "declared unsupported", "expected failure", "not run"]


@frozen(kw_only=True)
class Failure:
    """Why a check failed. No field is empty."""

    contract: str
    observed: str
    expected: str
    cause: str
    rerun: str
    docs: str

    def text(self) -> str:
        """The failure for people, a line each."""
        width = len("likely cause")
        lines = [
            ("contract", self.contract),
            ("observed", self.observed),
            ("expected", self.expected),
            ("likely cause", self.cause),
            ("rerun", self.rerun),
            ("docs", self.docs),
        ]
        return "\n".join(f"  {name:<{width}}  {' '.join(text.split())}" for name, text in lines)


@frozen(kw_only=True)
class Outcome:
    """The result of one check.

    Attributes:
        id, tier, required, capability: of the check.
        status: what became of it.
        seconds: how long it took.
        measured: numbers that it measured.
        reason: why it was not run, what is declared, or why failing is expected.
        failure: why it failed; None otherwise, except for an expected failure.
    """

    id: str
    tier: Tier
    required: bool
    capability: str | None
    status: Status
    seconds: float = 0.0
    measured: Mapping[str, float] = field(factory=dict)
    reason: str = ""
    failure: Failure | None = None

    @classmethod
    def of(cls, check: Check, status: Status, **rest: Any) -> Outcome:
        """The outcome of `check`."""
        return cls(
            id=check.id, tier=check.tier, required=check.required, capability=check.capability, status=status, **rest
        )

    def as_json(self) -> dict[str, Any]:
        """The outcome as JSON."""
        return attrs.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outcome:
        """The outcome that `as_json` gave."""
        failure = values["failure"]
        return cls(**{**values, "failure": Failure(**failure) if failure else None})
