"""Which plugins the operator allows: the value of ``TRIVET_PLUGINS``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from attrs import frozen

VARIABLE = "TRIVET_PLUGINS"


def _normalised(name: str) -> str:
    # Names of distributions compare like this (PEP 503); entry points then do so too.
    return re.sub(r"[-_.]+", "-", name).casefold()


@frozen
class Selection:
    """Plugins allowed and blocked by name.

    A selector is the name of an entry point, of a distribution, or ``distribution:name``. With none allowed
    by name, all are allowed; blocking outweighs allowing.

    Attributes:
        allowed: selectors without a sign.
        blocked: selectors that had ``-`` before them.
    """

    allowed: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Read a comma-separated list such as ``"qwen3,-noisy-observer"``. Empty text allows everything."""
        selectors = [selector for raw in text.split(",") if (selector := raw.strip()).strip("-")]
        return cls(
            allowed=tuple(selector for selector in selectors if not selector.startswith("-")),
            blocked=tuple(selector[1:].strip() for selector in selectors if selector.startswith("-")),
        )

    def why_blocked(self, name: str, distribution: str) -> str | None:
        """Why the entry point `name` of `distribution` is not to be used, or None when it may be."""
        names = _names_of(name, distribution)
        for selector in self.blocked:
            if _normalised(selector) in names:
                return f"blocked by -{selector} in {VARIABLE}"
        if self.allowed and not any(_normalised(selector) in names for selector in self.allowed):
            return f"not among those that {VARIABLE} allows: {', '.join(self.allowed)}"
        return None

    def unmatched(self, plugins: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """Selectors that name none of `plugins`, given as ``(name, distribution)``: probably misspelt."""
        known = {known for name, distribution in plugins for known in _names_of(name, distribution)}
        return tuple(s for s in (*self.allowed, *self.blocked) if _normalised(s) not in known)


def _names_of(name: str, distribution: str) -> tuple[str, str, str]:
    name, distribution = _normalised(name), _normalised(distribution)
    return name, distribution, f"{distribution}:{name}"
