"""The prefix cache: full pages found again by what they hold, and for hybrid models the snapshots beside them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice

from attrs import frozen

from trivet.caches.digests import ROOT_DIGEST
from trivet.caches.node import PrefixNode
from trivet.caches.pages import PagePool
from trivet.caches.slots import SlotPool
from trivet.caches.snapshots import SnapshotShelf
from trivet.errors import AccountingError, ConfigError


@frozen(eq=False)
class Match:
    """What the cache holds of a prompt.

    Attributes:
        node: where the usable part ends; the cache's root if nothing is usable.
        pages: pages of the usable part, in order.
        hit_tokens: tokens that need not be computed.
        page_tokens: tokens whose pages are cached. More than `hit_tokens` only for hybrid models, where a hit also
            needs a snapshot; what lies between is computed again.
    """

    node: PrefixNode
    pages: tuple[int, ...]
    hit_tokens: int
    page_tokens: int


class PrefixCache:
    """Full pages, known by the digest of all tokens up to their end (`trivet.caches.digests`).

    Nodes form a tree. A request pins the node at the end of its chain, and through it all nodes above. What is not
    pinned is *cached*: it may be evicted, leaf first, the least recently used leaf before the others. Since a pinned
    node's parents are pinned, the number of nodes without a pin is the number of pages that eviction can free.

    Lookup costs one dictionary access per matched page, whatever the cache holds; eviction costs the logarithm of
    what it holds.

    Args:
        pool: where pages come from and go back to.
        page_size: tokens per page.
        grain_tokens: a hit's length is a multiple of this: `page_size` for dense models, the snapshot stride for
            hybrid ones.
        snapshots: the snapshot ids of a hybrid model, or None for a dense one. With a pool of 0 the cache is off.

    Raises:
        ConfigError: `grain_tokens` is not a multiple of the page size, or not the page size for a dense model.
    """

    def __init__(
        self, pool: PagePool, page_size: int, grain_tokens: int | None = None, snapshots: SlotPool | None = None
    ) -> None:
        grain_tokens = page_size if grain_tokens is None else grain_tokens
        if grain_tokens < 1 or grain_tokens % page_size:
            raise ConfigError(
                f"snapshot_stride is {grain_tokens} tokens, expected a multiple of the page size ({page_size} tokens)"
            )
        if snapshots is None and grain_tokens != page_size:
            raise ConfigError(f"a prefix cache without snapshots has the page size as its grain, not {grain_tokens}")
        self.page_size = page_size
        self.grain_tokens = grain_tokens
        self.snapshots = SnapshotShelf(snapshots) if snapshots is not None else None
        self.root = PrefixNode(ROOT_DIGEST, -1, None)
        self.root.pins = 1
        self._pool = pool
        self._nodes: dict[bytes, PrefixNode] = {}
        self._cached = 0
        self._clock = 0
        self._entries = 0
        self._leaves: list[tuple[int, int, PrefixNode]] = []

    @property
    def enabled(self) -> bool:
        """Whether anything can ever be hit: False for a hybrid model without room for a snapshot."""
        return self.snapshots is None or self.snapshots.total > 0

    @property
    def cached_count(self) -> int:
        """Pages that only the cache holds: what eviction can free."""
        return self._cached

    def __len__(self) -> int:
        """Pages that a match can find, pinned ones included."""
        return len(self._nodes)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._nodes

    def match(self, digests: Sequence[bytes], limit_pages: int | None = None) -> Match:
        """The longest usable chain of cached pages. Changes nothing; pin it before anything else is done.

        Args:
            digests: digests of a prompt's pages, in order.
            limit_pages: look no further than this many; at least one token of a prompt must be left to compute.
        """
        nodes = self._nodes
        node = hit = self.root
        pages: list[int] = []
        for digest in islice(digests, limit_pages):
            child = nodes.get(digest)
            if child is None or child.parent is not node:
                break
            node = child
            pages.append(child.page)
            if child.snapshot is not None:
                hit = child
        if self.snapshots is None:
            hit = node
        return Match(hit, tuple(pages[: hit.depth]), hit.depth * self.page_size, len(pages) * self.page_size)

    def find(self, digest: bytes) -> PrefixNode | None:
        """The node with that digest, if there is one."""
        return self._nodes.get(digest)

    def pin(self, node: PrefixNode) -> None:
        """Keep `node` and the chain above it from eviction until `unpin`."""
        while True:
            node.pins += 1
            if node.pins > 1 or node.parent is None:
                return
            node.entry = 0
            self._cached -= 1
            node = node.parent

    def unpin(self, node: PrefixNode) -> None:
        """End one `pin`. What no other request pins becomes evictable, as the most recently used."""
        self._clock += 1
        while True:
            if node.pins <= (node.parent is None):
                raise AccountingError(f"prefix cache: page {node.page} is unpinned more often than pinned")
            node.pins -= 1
            if node.pins:
                return
            parent = node.parent
            assert parent is not None
            node.tick = self._clock
            self._cached += 1
            if not node.children:
                if node.detached:
                    self._discard(node)
                else:
                    self._enqueue(node)
            node = parent

    def publish(self, parent: PrefixNode, digest: bytes, page: int) -> PrefixNode:
        """Make a computed page findable below `parent`, which the caller has pinned.

        The caller's pin moves from `parent` to the node that is returned. If the node's page is `page`, the page is
        the cache's from now on. Otherwise another request that is running has published the same content before:
        its page stays the shared one, and `page` stays the caller's own.

        The same content in a node that nobody pins is replaced by `page`, and the older page is freed. So no page
        changes under a running request, and what eviction can free together with what is free never shrinks by
        publishing: a reservation made against the two holds.
        """
        node = None if parent.detached else self._nodes.get(digest)
        if node is not None and node.parent is not parent:  # left below a parent that has been detached
            self.detach(node)
            node = None
        if node is None:
            node = PrefixNode(digest, page, parent)
            parent.children += 1
            if not node.detached:
                self._nodes[digest] = node
            node.pins = 1  # and one pin less on the parent, which the child's own pin makes up for
            return node
        if not node.pins:
            self._pool.give_back((node.page,))
            node.page = page
        self.pin(node)
        self.unpin(parent)
        return node

    def evict(self, count: int) -> None:
        """Free `count` pages, least recently used leaves first. `AccountingError` if fewer are evictable."""
        if count > self._cached:
            raise AccountingError(f"prefix cache: {count} pages to evict, {self._cached} are evictable")
        while count > 0:
            _, entry, node = heapq.heappop(self._leaves)
            if node.entry == entry:
                before = self._cached
                self._discard(node)
                count -= before - self._cached

    def detach(self, node: PrefixNode) -> None:
        """Let no match find `node` again, nor what lies below it. Requests that pin it go on undisturbed."""
        if self._nodes.get(node.digest) is node:
            del self._nodes[node.digest]
        node.detached = True
        if self.snapshots is not None:
            self.snapshots.drop(node)
        if not node.pins and not node.children:
            self._discard(node)

    def retract(self, node: PrefixNode) -> None:
        """Detach the whole chain that ends at `node`, because what was computed from it turned out unusable."""
        while node.parent is not None:
            parent = node.parent
            self.detach(node)
            node = parent

    def clear(self) -> None:
        """Forget every page. Pages that running requests pin are freed when these end."""
        self.evict(self._cached)
        for node in list(self._nodes.values()):
            self.detach(node)

    def _discard(self, node: PrefixNode) -> None:
        """Free an unpinned node without children, and the detached ones above that this leaves useless."""
        while True:
            if self._nodes.get(node.digest) is node:
                del self._nodes[node.digest]
            if self.snapshots is not None:
                self.snapshots.drop(node)
            node.entry = 0
            node.detached = True
            self._cached -= 1
            self._pool.give_back((node.page,))
            parent = node.parent
            assert parent is not None
            parent.children -= 1
            if parent.children or parent.pins:
                return
            if not parent.detached:
                self._enqueue(parent)
                return
            node = parent

    def _enqueue(self, leaf: PrefixNode) -> None:
        """Enter an evictable leaf into the heap. Entries that have lapsed are skipped, and swept when they prevail."""
        if len(self._leaves) > 2 * len(self._nodes) + 64:
            self._leaves = [item for item in self._leaves if item[2].entry == item[1]]
            heapq.heapify(self._leaves)
        self._entries += 1
        leaf.entry = self._entries
        heapq.heappush(self._leaves, (leaf.tick, leaf.entry, leaf))
