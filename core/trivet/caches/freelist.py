"""A free list of small integers that refuses to be given back what it never lent."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.errors import AccountingError


class FreeList:
    """The ids 0 to ``total - 1``, each either free or lent. The latest returned is lent again first.

    Costs nothing for ids that were never lent, however large the total.

    Args:
        total: how many ids there are.
        what: what an id stands for, for messages: ``"page"``, ``"slot"``, ``"snapshot"``.
    """

    def __init__(self, total: int, what: str) -> None:
        if total < 0:
            raise AccountingError(f"{what} pool: a total of {total}, expected at least 0")
        self.total = total
        self.what = what
        self._returned: list[int] = []
        self._never_lent = 0  # this id and all above it
        self._lent: set[int] = set()

    @property
    def free_count(self) -> int:
        """How many ids are free."""
        return self.total - len(self._lent)

    def is_free(self, id_: int) -> bool:
        """Whether `id_` is free."""
        return id_ not in self._lent

    def take(self, count: int) -> list[int]:
        """Lend `count` ids. `AccountingError` if fewer are free; then nothing is lent."""
        if count < 0 or count > self.free_count:
            raise AccountingError(f"{self.what} pool: {count} asked for, {self.free_count} of {self.total} are free")
        reused = min(count, len(self._returned))
        taken = self._returned[len(self._returned) - reused :]
        taken.reverse()
        del self._returned[len(self._returned) - reused :]
        if reused < count:
            fresh = self._never_lent + count - reused
            taken.extend(range(self._never_lent, fresh))
            self._never_lent = fresh
        self._lent.update(taken)
        return taken

    def give_back(self, ids: Sequence[int]) -> None:
        """Return `ids`. `AccountingError` for one that is foreign or free already; then nothing is returned."""
        returned = set(ids)
        if len(returned) < len(ids) or not returned <= self._lent:
            wrong = [id_ for id_ in ids if id_ not in self._lent] or [id_ for id_ in ids if list(ids).count(id_) > 1]
            raise AccountingError(
                f"{self.what} pool: {self.what} {wrong[0]} is given back and is not lent: returned twice, "
                f"or not one of the {self.total} of this pool"
            )
        self._lent -= returned
        self._returned.extend(ids)
