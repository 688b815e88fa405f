"""The memory ledger against what is really held: buffer by buffer, and in total against the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from trivet.reservation import GRAPHS_DRIVER_LINE, GRAPHS_LINE, KV_LINE, MemoryLedger, size_text
from trivet.sampling.params import Sampling

if TYPE_CHECKING:
    from trivet.runtime.runtime import Runtime


def serve_longest_step(runtime: Runtime) -> None:
    """Serve a prompt of as many tokens as a step and a context hold, so that temporaries and kernels are there."""
    limits, pages = runtime._engine.blueprint.capacity.limits, runtime.memory.kv_pages
    new_tokens = 2  # so that a decode step is served too
    room_tokens = min(limits.max_step_tokens, limits.max_context - new_tokens, pages * limits.page_size - 1)
    if room_tokens >= 1:
        runtime.generate([[0] * room_tokens], Sampling(max_new_tokens=new_tokens, ignore_eos=True))


@frozen
class LiveMemory:
    """What a loaded runtime holds now, in bytes.

    Attributes:
        ledger: what was planned.
        owned_bytes: by line, the storages of its live buffers, pinned host memory included.
        pinned_bytes: of `owned_bytes`, what is host memory.
        allocated_bytes: what torch's allocator has given out on the device; None on a CPU.
        taken_bytes: what the driver says is taken of the device, by every process; None on a CPU.
        captured_bytes: by line, what capturing steps took: the pool of torch's allocator, which is this process's own,
            and what the device lost beside it, to whatever process. Empty without CUDA graphs.
    """

    ledger: MemoryLedger
    owned_bytes: dict[str, int]
    pinned_bytes: int
    allocated_bytes: int | None = None
    taken_bytes: int | None = None
    captured_bytes: dict[str, int] = field(factory=dict)

    @classmethod
    def of(cls, runtime: Runtime) -> LiveMemory:
        """Measure `runtime`."""
        import torch

        engine = runtime._engine
        owned = {line: buffers.storage_bytes for line, buffers in engine.owned.items()}
        pinned = sum(spec.bytes for buffers in engine.owned.values() for spec in buffers.layout.specs if spec.pinned)
        device = engine.inputs.device
        if device.type != "cuda":
            return cls(runtime.memory, owned, pinned)
        torch.cuda.synchronize(device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        captured = engine.captured
        return cls(
            runtime.memory,
            owned,
            pinned,
            allocated_bytes=torch.cuda.memory_allocated(device),
            taken_bytes=total_bytes - free_bytes,
            captured_bytes={}
            if captured is None
            else {GRAPHS_LINE: captured.pool_bytes, GRAPHS_DRIVER_LINE: captured.driver_bytes},
        )

    @property
    def differing(self) -> dict[str, tuple[int, int]]:
        """Owned lines whose live bytes are not the planned ones: planned and live."""
        planned = {line.name: line.bytes for line in self.ledger.items if line.owned}
        names = {*planned, *self.owned_bytes}
        pairs = {name: (planned.get(name, 0), self.owned_bytes.get(name, 0)) for name in sorted(names)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def without_kv_bytes(self) -> tuple[int, int | None]:
        """Planned device bytes of everything but KV pages, and what the driver says is taken beside those."""
        kv_bytes = self.ledger.line(KV_LINE).bytes
        planned = self.ledger.total_bytes - kv_bytes - self.pinned_bytes
        return planned, None if self.taken_bytes is None else self.taken_bytes - kv_bytes

    @property
    def difference_percent(self) -> float | None:
        """How far the driver's figure without KV pages is from the planned one, in percent of it; less is negative."""
        planned, taken = self.without_kv_bytes
        return None if taken is None else 100 * (taken - planned) / planned

    def table(self) -> str:
        """Line by line, planned and live, then the totals."""
        measured = {**self.owned_bytes, **self.captured_bytes}
        rows = [("", "planned", "live")]
        for line in self.ledger.items:
            live = size_text(measured[line.name]) if line.name in measured else "a bound"
            rows.append((line.name, size_text(line.bytes), live))
        rows.append(("total", size_text(self.ledger.total_bytes), ""))
        (planned, taken), percent = self.without_kv_bytes, self.difference_percent
        if taken is not None and self.allocated_bytes is not None:
            rows.append(("on the device, without KV pages", size_text(planned), size_text(taken)))
            rows.append(("difference", "", f"{percent:+.2f}%"))
            rows.append(("given out by torch", "", size_text(self.allocated_bytes)))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            f"{name:<{widths[0]}}  {planned:>{widths[1]}}  {live:>{widths[2]}}".rstrip() for name, planned, live in rows
        )

    def as_json(self) -> dict[str, object]:
        """The ledger's JSON with what was measured beside it."""
        planned, taken = self.without_kv_bytes
        return {
            **self.ledger.as_json(),
            "live": {
                "owned_bytes": self.owned_bytes,
                "pinned_bytes": self.pinned_bytes,
                "allocated_bytes": self.allocated_bytes,
                "taken_bytes": self.taken_bytes,
                "captured_bytes": self.captured_bytes,
                "without_kv": {
                    "planned_bytes": planned,
                    "taken_bytes": taken,
                    "difference_percent": self.difference_percent,
                },
            },
        }
