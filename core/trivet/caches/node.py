"""One page in the prefix cache."""

from __future__ import annotations


class PrefixNode:
    """A full page whose content is known by its digest, below the page that comes before it.

    Attributes:
        digest: digest of all tokens up to the end of the page.
        page: the page that holds their keys and values.
        parent: the node of the page before; None only for the root, which stands for the empty prefix.
        depth: pages from the start of the context, this one included.
        pins: requests whose chain ends here, plus children that are pinned. With none, nothing below is pinned.
        children: nodes below, directly.
        tick: when it was last unpinned, on the cache's own clock.
        entry: its live entry in the eviction heap; 0 without one.
        detached: no longer found by a match; gone as soon as it is unpinned and has no children.
        snapshot: id of the recurrent-state snapshot at the end of the page, or None.
        snapshot_owner: id of the request that will give the snapshot up for a later one, or None if it is to stay.
        restores: requests that are going to restore from the snapshot.
    """

    __slots__ = (
        "children",
        "depth",
        "detached",
        "digest",
        "entry",
        "page",
        "parent",
        "pins",
        "restores",
        "snapshot",
        "snapshot_owner",
        "tick",
    )

    def __init__(self, digest: bytes, page: int, parent: PrefixNode | None) -> None:
        self.digest = digest
        self.page = page
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.pins = 0
        self.children = 0
        self.tick = 0
        self.entry = 0
        self.detached: bool = parent is not None and parent.detached
        self.snapshot: int | None = None
        self.snapshot_owner: int | None = None
        self.restores = 0
