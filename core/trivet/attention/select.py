"""Choose the decode path that serves an attention geometry, and keep the reasons."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from attrs import frozen

from trivet.attention.protocol import DecodePath, PathRequest, Verdict
from trivet.attention.reference.path import REFERENCE
from trivet.errors import ConfigError

logger = logging.getLogger("trivet.attention")


@frozen
class Selection:
    """The chosen path and what every candidate answered.

    Attributes:
        path: the path that serves.
        reason: why it was chosen.
        verdicts: ``(path name, verdict)`` of each candidate, in their order, up to the chosen one.
    """

    path: DecodePath
    reason: str
    verdicts: tuple[tuple[str, Verdict], ...]

    @property
    def captures(self) -> bool:
        """Whether decode steps on the path can be captured in CUDA graphs."""
        return bool(getattr(self.path, "captures", False))


def candidates(own: Sequence[DecodePath], installed: Sequence[DecodePath]) -> tuple[DecodePath, ...]:
    """The paths in the order in which they are asked.

    Args:
        own: those that the family registered.
        installed: those of installed backends. They come behind the family's, but before the reference path where that
            is the family's last: it serves on any device, so that none behind it is ever asked.
    """
    ahead = tuple(own)
    last = ahead[-1:] if ahead and ahead[-1].name == REFERENCE else ()
    return (*ahead[: len(ahead) - len(last)], *installed, *last)


def select_path(paths: Sequence[DecodePath], need: PathRequest, installed: Sequence[DecodePath] = ()) -> Selection:
    """The first of `paths` whose predicate says yes.

    Args:
        installed: those of `paths` that installed backends brought: one whose predicate fails is passed over, since it
            is asked for models that have nothing to do with it.

    Raises:
        ConfigError: no path serves `need`; the message gives every candidate's reason. Or the backend that was asked
            for is none of theirs; the message gives their names.
    """
    backends = list(dict.fromkeys(path.backend for path in paths))
    if backends and need.backend not in (None, *backends):
        raise ConfigError(
            f"no attention backend is called {need.backend!r}: expected one of {', '.join(map(repr, backends))}, or "
            "none, so that the paths' predicates choose"
        )
    verdicts: list[tuple[str, Verdict]] = []
    for path in paths:
        if need.backend is not None and path.backend != need.backend:
            verdict = Verdict(False, f"it belongs to backend {path.backend!r}; {need.backend!r} was asked for")
        elif any(path is other for other in installed):
            verdict = _asked(path, need)
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


def _asked(path: DecodePath, need: PathRequest) -> Verdict:
    """What the predicate says; no, with a warning, where it fails."""
    try:
        verdict: object = path.usable(need)
        if isinstance(verdict, Verdict):
            return verdict
        reason = f"its predicate gave {verdict!r}, expected a Verdict"
    except Exception as error:
        reason = f"its predicate raised {type(error).__name__}: {error}"
    logger.warning("decode path %r of backend %r is passed over: %s; tell its author", path.name, path.backend, reason)
    return Verdict(False, reason)
