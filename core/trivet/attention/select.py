"""Choose the decode path that serves an attention geometry, and keep the reasons."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from trivet.attention.protocol import DecodePath, PathRequest, Verdict
from trivet.errors import ConfigError


@frozen
class Selection:
    """The chosen path and what every candidate answered.

    Attributes:
        path: the path that serves.
        reason: why it was chosen.
        verdicts: ``(path name, verdict)`` of each candidate, in the family's order, up to the chosen one.
    """

    path: DecodePath
    reason: str
    verdicts: tuple[tuple[str, Verdict], ...]


def select_path(paths: Sequence[DecodePath], need: PathRequest) -> Selection:
    """The first path, in the family's order, whose predicate says yes.

    Raises:
        ConfigError: no path serves `need`; the message gives every candidate's reason.
    """
    verdicts: list[tuple[str, Verdict]] = []
    for path in paths:
        if need.backend is not None and path.backend != need.backend:
            verdict = Verdict(False, f"it belongs to backend {path.backend!r}; {need.backend!r} was asked for")
        else:
            verdict = path.usable(need)
        verdicts.append((path.name, verdict))
        if verdict.ok:
            return Selection(path, verdict.reason, tuple(verdicts))
    reasons = "; ".join(f"{name}: {verdict.reason}" for name, verdict in verdicts) or "the family registers no path"
    asked = f" of backend {need.backend!r}" if need.backend else ""
    raise ConfigError(
        f"no decode path{asked} serves attention {need.attention.label} in {need.dtype} under the "
        f"{need.numeric_policy!r} policy on {need.device.name}: {reasons}"
    )
