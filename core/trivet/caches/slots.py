"""Which slots are free: request slots (sampling row and recurrent state), and snapshot ids."""

from __future__ import annotations

from trivet.caches.freelist import FreeList


class SlotPool:
    """Free list over the slots 0 to ``total - 1``. A slot is never derived from a request's id."""

    def __init__(self, total: int, what: str = "slot") -> None:
        self._slots = FreeList(total, what)
        self.total = total

    @property
    def free_count(self) -> int:
        """Slots that nobody owns."""
        return self._slots.free_count

    def is_free(self, slot: int) -> bool:
        """Whether nobody owns `slot`."""
        return self._slots.is_free(slot)

    def take(self) -> int:
        """Take a slot; `AccountingError` if none is free."""
        return self._slots.take(1)[0]

    def give_back(self, slot: int) -> None:
        """Return `slot`; `AccountingError` if it is free already or not of this pool."""
        self._slots.give_back((slot,))
