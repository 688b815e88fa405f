"""What admitted requests hold: pages, slots, reservations, places in the prefix cache, snapshots."""

from __future__ import annotations

from collections.abc import Iterable

from trivet.caches.digests import extend_digests
from trivet.caches.pages import PagePool
from trivet.caches.prefix import Match, PrefixCache
from trivet.caches.slots import SlotPool
from trivet.errors import AccountingError
from trivet.scheduler.admission import AdmissionGate
from trivet.scheduler.plan import SavePoint
from trivet.scheduler.request import NEVER_TOKENS, NO_SLOT, Request


class Holdings:
    """Hands out and takes back. Whatever a request holds is noted on the request, and nowhere else.

    Args:
        gate: holds the reservations.
        pool: the KV pages.
        slots: request slots.
        prefix: the prefix cache over `pool`; None, or one that is not enabled, to do without.
        prompts_alone: whether others are offered what prompts left, and nothing of new tokens.
    """

    def __init__(
        self,
        gate: AdmissionGate,
        pool: PagePool,
        slots: SlotPool,
        prefix: PrefixCache | None,
        *,
        prompts_alone: bool = False,
    ) -> None:
        self.gate = gate
        self.pool = pool
        self.slots = slots
        self.prefix = prefix if prefix is not None and prefix.enabled else None
        self.shelf = self.prefix.snapshots if self.prefix is not None else None
        self.page_size = gate.limits.page_size
        self.grain_tokens = prefix.grain_tokens if prefix is not None else self.page_size
        self.prefix_hit_tokens = 0
        self.prefix_prompt_tokens = 0  # of the prompts that were looked up
        self._prompts_alone = prompts_alone
        self._openings = 0  # what may let in a request that did not fit
        self._blocked: tuple[Request, int, int] | None = None  # who did not fit, openings then, pages matched then

    @property
    def cached_pages(self) -> int:
        """Pages that only the prefix cache holds."""
        return self.prefix.cached_count if self.prefix is not None else 0

    # Admission and release.

    def prepare(self, request: Request) -> None:
        """Check `request` and digest its prompt. Thread-safe: touches the request alone.

        Raises:
            RequestRejected: it could never be served.
        """
        self.gate.check(request.prompt_tokens, request.max_new_tokens, request.kind)
        if self._shares(request):
            extend_digests(request.digests, request.tokens, self.page_size, self._matchable_pages(request))
        request.lifetime_pages = self.gate.pages(request.lifetime_tokens)

    def admit(self, request: Request) -> bool:
        """Give `request` a slot, the pages that it shares, and a reservation for the rest; False if it does not fit."""
        if not self.slots.free_count or self._still_blocked(request):
            return False
        match = None
        shared_pages = matched_pages = 0
        if self.prefix is not None and self._shares(request):
            match = self.prefix.match(request.digests, self._matchable_pages(request))
            self.prefix.pin(match.node)  # before anything is counted or evicted
            shared_pages, matched_pages = len(match.pages), match.page_tokens // self.page_size
        slot = NO_SLOT
        new_pages = request.lifetime_pages - shared_pages
        try:
            fits = self.gate.fits(new_pages, self.pool.free_count, self.cached_pages)
            if fits:
                slot = self.slots.take()
        finally:
            if slot == NO_SLOT and self.prefix is not None and match is not None:
                self.prefix.unpin(match.node)
        if not fits:
            self._blocked = (request, self._openings, matched_pages)
            return False
        self._blocked = None
        request.slot = slot
        request.node = match.node if match is not None else None
        try:
            self.gate.reserve(new_pages)
            request.reserved_pages = new_pages
            if match is not None:
                self._share(request, match)
        except BaseException:
            self.release(request)
            raise
        return True

    def release(self, request: Request) -> None:
        """Take back all that `request` holds. Its published pages stay in the prefix cache, evictable."""
        if request.restore_from is not None:
            self._drop_restore(request)
        if self.prefix is not None and request.node is not None:
            self.pool.give_back(request.pages[request.published_pages :])
            self.pool.give_back(request.duplicates)
            self.prefix.unpin(request.node)
        else:
            self.pool.give_back(request.pages)
        if request.slot != NO_SLOT:
            self.slots.give_back(request.slot)
        self.gate.release(request.reserved_pages)
        del request.pages[:]
        request.duplicates = []
        request.digests = []
        request.node = request.trail_node = None
        request.slot = NO_SLOT
        request.reserved_pages = 0
        self._openings += 1

    def _share(self, request: Request, match: Match) -> None:
        """Let `request` start behind what was matched and pinned for it."""
        request.node = match.node
        request.pages.extend(match.pages)
        request.published_pages = len(match.pages)
        request.page_room_tokens = match.hit_tokens
        request.publish_at_tokens = match.hit_tokens + self.page_size
        request.cached_tokens = request.computed_tokens = request.scheduled_tokens = match.hit_tokens
        self.prefix_hit_tokens += match.hit_tokens
        self.prefix_prompt_tokens += request.prompt_tokens
        if self.shelf is not None:
            # Snapshots are wanted at the branch point, and at the last boundary of the prompt.
            branch = match.page_tokens // self.grain_tokens * self.grain_tokens
            last = (request.prompt_tokens - 1) // self.grain_tokens * self.grain_tokens
            request.boundaries = sorted({boundary for boundary in (branch, last) if boundary > match.hit_tokens})
            if match.hit_tokens:
                self.shelf.hold(match.node)
                request.restore_from = match.node

    def _still_blocked(self, request: Request) -> bool:
        """Whether nothing has happened since `request` did not fit that could let it in.

        Only a release adds to what is free and evictable beside the reservations, and only one more page of its own
        prompt in the cache, or a snapshot at one that is there, lowers what it needs.
        """
        if self._blocked is None or self._blocked[0] is not request or self._blocked[1] != self._openings:
            return False
        if self.prefix is None or not self._shares(request):
            return True
        matched = self._blocked[2]
        return matched >= self._matchable_pages(request) or request.digests[matched] not in self.prefix

    def _shares(self, request: Request) -> bool:
        """Whether `request` uses and feeds the prefix cache. A score needs the logits of every position."""
        return self.prefix is not None and request.kind == "generate"

    def _matchable_pages(self, request: Request) -> int:
        """Pages of the prompt that may be hit: one token at least is computed."""
        return (request.prompt_tokens - 1) // self.page_size

    # Growth.

    def grow(self, request: Request, tokens: int) -> None:
        """Take the pages that `request` lacks to hold `tokens`, from its reservation, evicting if none is free."""
        count = self.gate.pages(tokens) - len(request.pages)
        if count <= 0:
            return
        if count > request.reserved_pages:
            raise AccountingError(f"{request!r} takes {count} pages, {request.reserved_pages} are reserved for it")
        missing = count - self.pool.free_count
        if missing > 0 and self.prefix is not None:
            self.prefix.evict(missing)
        request.pages.extend(self.pool.take(count))
        request.page_room_tokens += count * self.page_size
        request.reserved_pages -= count
        self.gate.release(count)

    def publish(self, request: Request) -> None:
        """Offer the pages of `request` that are full and computed to others."""
        prefix, node = self.prefix, request.node
        if prefix is None or node is None:
            request.publish_at_tokens = NEVER_TOKENS
            return
        offered_tokens = request.computed_tokens
        if self._prompts_alone:
            offered_tokens = min(offered_tokens, request.prompt_tokens)
        full_pages = offered_tokens // self.page_size
        extend_digests(request.digests, request.tokens, self.page_size, full_pages)
        for index in range(request.published_pages, full_pages):
            page = request.pages[index]
            node = prefix.publish(node, request.digests[index], page)
            if node.page != page:
                request.duplicates.append(page)
            request.node = node  # page by page: what a later one raises finds the accounts right
            request.published_pages = index + 1
        request.publish_at_tokens = (request.computed_tokens // self.page_size + 1) * self.page_size

    def stop_publishing(self, request: Request) -> None:
        """Offer no further page of `request` to others."""
        request.publish_at_tokens = NEVER_TOKENS

    def publishes(self, request: Request) -> bool:
        """Whether pages of `request` are offered to others as they fill."""
        return request.publish_at_tokens != NEVER_TOKENS

    def retract(self, request: Request) -> None:
        """Offer nothing of the chain of `request` any more: what was computed from it is unusable."""
        if self.prefix is not None and request.node is not None:
            self.prefix.retract(request.node)

    # Snapshots.

    def take_restore(self, request: Request) -> int | None:
        """The snapshot that the first step of `request` restores, if any; it is protected up to here."""
        node = request.restore_from
        if node is None:
            return None
        snapshot = node.snapshot
        assert snapshot is not None
        self._drop_restore(request)
        return snapshot

    def plan_save(self, request: Request, row: int, boundary_tokens: int) -> SavePoint | None:
        """A snapshot to save once `request` is computed up to `boundary_tokens`; None if it is not wanted.

        Called with every boundary of its own inside a scheduled piece, and with every end of a piece that is a multiple
        of the grain. A boundary inside the prompt is wanted if it is one of the request's own; its
        snapshot stays. One at the prompt's end or in the new tokens is given up for the next, and makes no room for
        itself at the expense of those inside the prompts of running requests.
        """
        if self.shelf is None or self.prefix is None or request.node is None:
            return None
        trailing = boundary_tokens >= request.prompt_tokens
        if trailing:
            if self._prompts_alone and boundary_tokens > request.prompt_tokens:
                return None
            snapshot = self.shelf.take(first=request.trail_node, owner=request.id, trailing=True)
        else:
            if boundary_tokens not in request.boundaries:
                return None
            request.boundaries.remove(boundary_tokens)
            known = self.prefix.find(request.digests[boundary_tokens // self.page_size - 1])
            if known is not None and known.snapshot is not None:
                self.shelf.keep(known)
                return None
            snapshot = self.shelf.take(owner=request.id)
        return SavePoint(row, snapshot, boundary_tokens, trailing) if snapshot is not None else None

    def attach_save(self, request: Request, save: SavePoint) -> None:
        """Make a snapshot findable that was saved, at the node of `request` which its step has published."""
        node = request.node
        assert self.shelf is not None and node is not None
        depth = save.boundary_tokens // self.page_size
        while node.depth > depth and node.parent is not None:  # saved inside the piece
            node = node.parent
        if node.depth != depth:
            raise AccountingError(f"{request!r}: a snapshot at {save.boundary_tokens} tokens, {node.depth} pages deep")
        attached = self.shelf.attach(node, save.snapshot, request.id if save.trailing else None)
        self._openings += 1
        if save.trailing and attached:
            if request.trail_node is not None:
                self.shelf.give_up(request.trail_node, request.id)
            request.trail_node = node

    def drop_saves(self, saves: Iterable[SavePoint]) -> None:
        """Take back snapshots that were planned and will not be findable."""
        for save in saves:
            assert self.shelf is not None
            self.shelf.give_back(save.snapshot)

    def _drop_restore(self, request: Request) -> None:
        assert self.shelf is not None and request.restore_from is not None
        self.shelf.unhold(request.restore_from)
        request.restore_from = None
