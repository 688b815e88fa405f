"""The memory ledger against what is really held: buffer by buffer, and in total against the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from trivet.reservation import KV_LINE, MemoryLedger, size_text
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
        allocated_bytes: what torch's allocator has given out on the device; None on a CPU.
        taken_bytes: what the driver says is taken of the device, by everybody; None on a CPU.
        pinned_bytes: of `owned_bytes`, what is host memory.
    """

    ledger: MemoryLedger
    owned_bytes: dict[str, int]
    pinned_bytes: int
    allocated_bytes: int | None = None
    taken_bytes: int | None = None

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
        return cls(
            runtime.memory,
            owned,
            pinned,
            allocated_bytes=torch.cuda.memory_allocated(device),
            taken_bytes=total_bytes - free_bytes,
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

    def table(self) -> str:
        """Line by line, planned and live, then the totals."""
        rows = [("", "planned", "live")]
        for line in self.ledger.items:
            live = size_text(self.owned_bytes[line.name]) if line.name in self.owned_bytes else "a bound"
            rows.append((line.name, size_text(line.bytes), live))
        rows.append(("total", size_text(self.ledger.total_bytes), ""))
        planned, taken = self.without_kv_bytes
        if taken is not None and self.allocated_bytes is not None:
            rows.append(("on the device, without KV pages", size_text(planned), size_text(taken)))
            rows.append(("given out by torch", "", size_text(self.allocated_bytes)))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            f"{name:<{widths[0]}}  {planned:>{widths[1]}}  {live:>{widths[2]}}".rstrip() for name, planned, live in rows
        )

    def as_json(self) -> dict[str, object]:
        """The ledger's JSON with what was measured beside it."""
        return {
            **self.ledger.as_json(),
            "live": {
                "owned_bytes": self.owned_bytes,
                "pinned_bytes": self.pinned_bytes,
                "allocated_bytes": self.allocated_bytes,
                "taken_bytes": self.taken_bytes,
            },
        }
