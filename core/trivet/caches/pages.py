"""Which pages of the KV cache are free. Counts only; the tensors are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.caches.freelist import FreeList


class PagePool:
    """Free list over the pages 0 to ``total - 1``.

    A page is free, cached (held by the prefix cache alone, evictable) or held (by requests); the three add up to
    `total`. Pages kept for padding lie outside.
    """

    def __init__(self, total: int) -> None:
        self._pages = FreeList(total, "page")
        self.total = total

    @property
    def free_count(self) -> int:
        """Pages that nobody owns."""
        return self._pages.free_count

    def is_free(self, page: int) -> bool:
        """Whether nobody owns `page`."""
        return self._pages.is_free(page)

    def take(self, count: int) -> list[int]:
        """Take `count` pages; `AccountingError` if fewer are free (admission reserves, so that this cannot be)."""
        return self._pages.take(count)

    def give_back(self, pages: Sequence[int]) -> None:
        """Return `pages`; `AccountingError` for a page that is free already or not of this pool."""
        self._pages.give_back(pages)
