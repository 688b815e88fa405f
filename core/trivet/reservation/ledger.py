"""Every byte that is held, counted once. Admission, subtraction and what people read come from the same total."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from attrs import field, frozen

from trivet import checked
from trivet.errors import CapacityExceeded, MemoryBudgetError
from trivet.layout import BufferLayout

KV_LINE = "KV pages"
MOST_KV_PAGES = checked.INT32_MAX - 1
"""Kernels count pages as int32, the padding page among them."""


@frozen
class LedgerLine:
    """One reservation.

    Attributes:
        name: what it is for.
        bytes: how much it takes.
        source: where the number comes from.
        owned: whether live buffers of exactly this size stand behind it; otherwise it is a bound on temporaries.
        lower: the argument or limit that makes this line smaller, for advice.
    """

    name: str
    bytes: int
    source: str
    owned: bool = True
    lower: str = ""

    @classmethod
    def of_layout(cls, layout: BufferLayout, lower: str = "", name: str | None = None) -> LedgerLine:
        """The line of a layout: its bytes are read off it."""
        source = f"layout of {len(layout.specs)} buffers"
        return cls(name or layout.name, layout.total_bytes, source, owned=True, lower=lower)


def _lines(lines: Iterable[LedgerLine]) -> tuple[LedgerLine, ...]:
    return tuple(lines)


@frozen
class MemoryLedger:
    """Named lines, summed once with checked arithmetic.

    Attributes:
        items: the lines, KV pages last.
        kv_pages: pages that requests may hold; the padding page comes on top.
        budget_bytes: what the whole runtime may take.
        total_bytes: the sum of all lines.
    """

    items: tuple[LedgerLine, ...] = field(converter=_lines)
    kv_pages: int
    budget_bytes: int
    total_bytes: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "total_bytes", checked.sum_bytes("memory ledger", (line.bytes for line in self.items)))

    def line(self, name: str) -> LedgerLine:
        """The line called `name`; KeyError if there is none."""
        for line in self.items:
            if line.name == name:
                return line
        raise KeyError(name)

    def as_json(self) -> dict[str, object]:
        """``{"items": [{"name", "bytes", "source"}], "total_bytes", "kv_pages"}``."""
        return {
            "items": [{"name": line.name, "bytes": line.bytes, "source": line.source} for line in self.items],
            "total_bytes": self.total_bytes,
            "kv_pages": self.kv_pages,
        }

    def table(self) -> str:
        """The ledger as plain text, a line each, with the total and the budget."""
        rows = [*((line.name, line.bytes, line.source) for line in self.items)]
        rows += [("total", self.total_bytes, ""), ("budget", self.budget_bytes, "")]
        width = max(len(name) for name, _, _ in rows)
        return "\n".join(f"{name:<{width}}  {size_text(size):>11}  {source}".rstrip() for name, size, source in rows)


def reserve(
    lines: Sequence[LedgerLine],
    kv_layout_of: Callable[[int], BufferLayout],
    *,
    budget_bytes: int,
    kv_pages: int | None,
    most_pages: int | None,
) -> MemoryLedger:
    """Sum `lines`, and give what the budget leaves to KV pages.

    Args:
        kv_layout_of: the KV cache's layout for a number of pages; bytes per page are read off it.
        budget_bytes: what the whole runtime may take.
        kv_pages: an exact number of pages; None takes what the budget leaves.
        most_pages: never take more than this when `kv_pages` is None; None for no bound.

    Raises:
        MemoryBudgetError: the lines and at least one page (or `kv_pages` pages) do not fit; carries the ledger.
        CapacityExceeded: a count does not fit what kernels take.
    """
    padding = kv_layout_of(0).total_bytes
    page_bytes = kv_layout_of(1).total_bytes - padding
    fixed = checked.sum_bytes("memory ledger", (line.bytes for line in lines))
    pages = kv_pages
    if pages is None:
        left = budget_bytes - fixed - padding
        pages = min(max(0, left // page_bytes), MOST_KV_PAGES) if page_bytes else MOST_KV_PAGES
        if most_pages is not None:
            pages = min(pages, most_pages)
    check_kv_pages(pages)
    kv = kv_layout_of(pages)
    source = f"{pages} pages of {page_bytes} bytes, and {padding} bytes for padding rows"
    ledger = MemoryLedger(
        items=(*lines, LedgerLine(KV_LINE, kv.total_bytes, source, owned=True, lower="kv_pages")),
        kv_pages=pages,
        budget_bytes=budget_bytes,
    )
    if pages < 1 or ledger.total_bytes > budget_bytes:
        raise MemoryBudgetError(_too_small(ledger, page_bytes, exact=kv_pages is not None))
    return ledger


def check_kv_pages(pages: int) -> None:
    """Raise `CapacityExceeded` if kernels cannot take so many pages, whatever memory there is."""
    if pages > MOST_KV_PAGES:
        raise CapacityExceeded(
            "kv_pages", pages, MOST_KV_PAGES, "kernels take this count, with a padding page, as int32: lower kv_pages"
        )


def _too_small(ledger: MemoryLedger, page_bytes: int, *, exact: bool) -> str:
    short = ledger.total_bytes - ledger.budget_bytes if exact else page_bytes + ledger.total_bytes - ledger.budget_bytes
    candidates = [line for line in ledger.items if line.lower and (exact or line.name != KV_LINE)]
    fixed_bytes = ledger.total_bytes - sum(line.bytes for line in candidates)
    advice = "give it more memory"
    if fixed_bytes > ledger.budget_bytes:
        advice += f", since no limit changes {size_text(fixed_bytes)} of it"
    elif candidates:
        largest = max(candidates, key=lambda line: line.bytes)
        how = f"use {largest.lower}" if "=" in largest.lower else f"lower {largest.lower}"
        advice = f"{how} ({largest.name!r} takes {size_text(largest.bytes)}), or {advice}"
    asked = f"kv_pages={ledger.kv_pages}" if exact else "one KV page"
    return (
        f"the memory budget of {size_text(ledger.budget_bytes)} ({ledger.budget_bytes} bytes) is {short} bytes too "
        f"small for what the limits ask for and {asked}: {advice}.\n{ledger.table()}"
    )


def size_text(size_bytes: int) -> str:
    """Bytes for people, for example ``"1.50 GiB"``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{int(value)} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
