"""Which snapshots of recurrent state are kept, at which node, and which one makes room when all are in use."""

from __future__ import annotations

from collections import OrderedDict

from trivet.caches.node import PrefixNode
from trivet.caches.slots import SlotPool


class SnapshotShelf:
    """Snapshot ids: free, lent for a save that is under way, or attached to a node.

    An id never dangles: a node gives its snapshot back before it goes.
    """

    def __init__(self, ids: SlotPool) -> None:
        self._ids = ids
        self._by_use: OrderedDict[PrefixNode, None] = OrderedDict()

    @property
    def total(self) -> int:
        """Snapshots that the reserved memory holds."""
        return self._ids.total

    @property
    def free_count(self) -> int:
        """Ids that are neither attached nor lent."""
        return self._ids.free_count

    def take(self, *, first: PrefixNode | None = None, owner: int, trailing: bool = False) -> int | None:
        """An id to save into, or None if none can be had. The least recently used snapshot makes room.

        Those that are given up sooner or later come before the others, and one that a request is still going to restore
        from never does.

        Args:
            first: node whose snapshot makes room before any other, if it still belongs to `owner`.
            owner: id of the request that saves.
            trailing: whether it saves one that it will give up for a later one. No snapshot of a running request makes
                room for such a one: each keeps the boundary at which its prompt can be hit again.
        """
        if not self._ids.free_count:
            victim = first if first is not None and self._gives_up(first, owner) else self._oldest(trailing)
            if victim is None:
                return None
            self.drop(victim)
        return self._ids.take()

    def attach(self, node: PrefixNode, snapshot: int, owner: int | None) -> bool:
        """Make a written snapshot findable at `node`; False if the id was given back because it is not needed.

        Args:
            owner: id of the request that will give it up for a later one; None if it is to stay.
        """
        if node.detached or node.snapshot is not None:
            self._ids.give_back(snapshot)
            if node.snapshot is not None and owner is None:
                self.keep(node)
            return False
        node.snapshot = snapshot
        node.snapshot_owner = owner
        self._by_use[node] = None
        return True

    def give_back(self, snapshot: int) -> None:
        """Return an id that was taken and not attached."""
        self._ids.give_back(snapshot)

    def keep(self, node: PrefixNode) -> None:
        """Mark the snapshot of `node` as used now, and as one that no request gives up."""
        node.snapshot_owner = None
        self._by_use.move_to_end(node)

    def hold(self, node: PrefixNode) -> int:
        """Protect the snapshot of `node`, and return its id, until `unhold`."""
        assert node.snapshot is not None
        node.restores += 1
        self.keep(node)
        return node.snapshot

    def unhold(self, node: PrefixNode) -> None:
        """End one `hold`."""
        node.restores -= 1
        if node.detached:
            self.drop(node)

    def give_up(self, node: PrefixNode, owner: int) -> None:
        """Drop the snapshot of `node` if it is still `owner`'s to give up."""
        if self._gives_up(node, owner):
            self.drop(node)

    def drop(self, node: PrefixNode) -> None:
        """Free the snapshot of `node`, if it has one and nobody is going to restore from it."""
        if node.snapshot is None or node.restores:
            return
        self._ids.give_back(node.snapshot)
        node.snapshot = None
        node.snapshot_owner = None
        del self._by_use[node]

    def _gives_up(self, node: PrefixNode, owner: int) -> bool:
        return node.snapshot is not None and node.snapshot_owner == owner and not node.restores

    def _oldest(self, trailing: bool) -> PrefixNode | None:
        free = [node for node in self._by_use if not node.restores and not (trailing and node.pins)]
        given_up = (node for node in free if node.snapshot_owner is not None and (trailing or node.pins))
        return next(given_up, free[0] if free else None)
