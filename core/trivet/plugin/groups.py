"""The entry-point groups that Trivet reads.

A group's name carries the API's version: a plugin made for another one is told apart before any of its code
is imported.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher, get_close_matches

from attrs import frozen

API_VERSION = 1


@frozen
class Group:
    """One entry-point group.

    Attributes:
        name: as it stands in a distribution's metadata.
        hook: the hook that a plugin of this group must implement.
        brings: what that is, for people.
        exclusive: whether an entry point's name may be claimed by one distribution only.
    """

    name: str
    hook: str
    brings: str
    exclusive: bool


FAMILIES = Group(f"trivet.plugins.v{API_VERSION}", "trivet_model_families", "model families", exclusive=True)
BACKENDS = Group(f"trivet.backends.v{API_VERSION}", "trivet_attention_backends", "attention backends", exclusive=True)
OBSERVERS = Group(f"trivet.observers.v{API_VERSION}", "trivet_observe_step", "step observers", exclusive=False)

GROUPS = {group.name: group for group in (FAMILIES, BACKENDS, OBSERVERS)}

_VERSIONED = re.compile(r"(trivet\.(?:plugins|backends|observers))\.v(\d+)")
_CLOSE = 0.9
"""Similarity from which a group that does not begin with ``trivet`` is taken for a misspelling."""


def other_version_of(name: str) -> Group | None:
    """The served group of which `name` is another API version, or None."""
    match = _VERSIONED.fullmatch(name)
    if match is None or name in GROUPS:
        return None
    return GROUPS[f"{match[1]}.v{API_VERSION}"]


def near_miss_of(name: str) -> Group | None:
    """The served group that `name` was probably meant to be, or None when it is another project's."""
    if name in GROUPS or other_version_of(name) is not None:
        return None
    folded = name.casefold()
    ours = re.match(r"trivet(\W|_|$)", folded) is not None
    closest = max(GROUPS, key=lambda group: SequenceMatcher(None, folded, group).ratio())
    if ours or get_close_matches(folded, [closest], cutoff=_CLOSE):
        return GROUPS[closest]
    return None
