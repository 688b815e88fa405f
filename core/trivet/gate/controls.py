"""Faults put in on purpose between two steps: a gate that does not notice them proves nothing.

Each one changes what buffers hold, never a Python object, so that captured CUDA graphs meet it too. Attention does not
depend on the order of pages that are full, since keys carry their positions: exchanging two of them within a row is no
fault. So pages are exchanged between rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from attrs import frozen

from trivet.gate.passes import Bench, Evidence
from trivet.gate.session import Served, Session
from trivet.gate.settings import CONTROL_NEW_TOKENS, CONTROL_PROMPTS
from trivet.geometry import ModelGeometry

if TYPE_CHECKING:
    from trivet.runtime.engine import Engine
    from trivet.runtime.handle import Request

SHORT, FIRST, SECOND = 0, 1, 2
"""Rows of `CONTROL_PROMPTS` that faults are put into."""
SHIFTS, PAGES = (1, 16, 256, 1024), (1, 2)
"""Random weights have no sense of neighbouring positions, least of all where few layers attend and few entries rotate:
there a shift by one may drown in the rounding of bfloat16, and a larger one is tried. What was needed is reported."""


class Fault(Protocol):
    """Something wrong with the buffers of an engine."""

    def strike(self) -> bool:
        """Called before each step in which all rows decode; whether anything was changed."""

    def undo(self) -> None:
        """Mend what requests do not take with them when they end."""


class SwappedPage:
    """The first `size` pages of two rows are exchanged, once, in every layer."""

    def __init__(self, engine: Engine, requests: Sequence[Request], size: int) -> None:
        self._engine = engine
        first, second = (list(requests[row]._scheduled.pages[:size]) for row in (FIRST, SECOND))
        self._to, self._of = first + second, second + first
        self._struck = False

    def strike(self) -> bool:
        if not self._struck:
            for index in self._engine.blueprint.geometry.attention_layers:
                for cache in self._engine.cache.layer(index):
                    cache[self._to] = cache[self._of]
        changed, self._struck = not self._struck, True
        return changed

    def undo(self) -> None:
        pass


class ShiftedPosition:
    """Every row decodes as if it were `size` positions further on: the rotary tables move by so many rows."""

    def __init__(self, engine: Engine, requests: Sequence[Request], size: int) -> None:
        self._size = size
        self._tables = [(table.buffers["table"], table.rotary_dim) for table in engine.rotary.values()]
        self._right: list[torch.Tensor] = []

    def strike(self) -> bool:
        if self._right:
            return False
        for table, row in self._tables:
            self._right.append(table.clone())
            by = row * self._size
            table[:-by] = self._right[-1][by:]
        return True

    def undo(self) -> None:
        for (table, _), right in zip(self._tables, self._right, strict=False):
            table.copy_(right)


class StaleRow:
    """The keys and values that a row has just appended are lost: its first ones stand in their place."""

    def __init__(self, engine: Engine, requests: Sequence[Request], size: int) -> None:
        self._engine = engine
        self._request = requests[SHORT]._scheduled

    def strike(self) -> bool:
        request, page_size = self._request, self._engine.blueprint.capacity.limits.page_size
        last = request.computed_tokens - 1
        if last < request.prompt_tokens:
            return False
        page, offset = request.pages[last // page_size], last % page_size
        for index in self._engine.blueprint.geometry.attention_layers:
            for cache in self._engine.cache.layer(index):
                cache[page, offset] = cache[request.pages[0], 0]
        return True

    def undo(self) -> None:
        pass


class StaleState:
    """The recurrent and convolution state of two rows does not advance."""

    def __init__(self, engine: Engine, requests: Sequence[Request], size: int) -> None:
        self._states = _states(engine, [requests[row]._scheduled.slot for row in (SHORT, FIRST)])
        self._old: list[torch.Tensor] = []

    def strike(self) -> bool:
        if not self._old:
            self._old = [state[slots].clone() for state, slots in self._states]
            return False
        for (state, slots), old in zip(self._states, self._old, strict=True):
            state[slots] = old
        return True

    def undo(self) -> None:
        pass


class SwappedSlot:
    """The recurrent and convolution states of two rows are exchanged, once, in every layer."""

    def __init__(self, engine: Engine, requests: Sequence[Request], size: int) -> None:
        self._states = _states(engine, [requests[row]._scheduled.slot for row in (FIRST, SECOND)])
        self._struck = False

    def strike(self) -> bool:
        if not self._struck:
            for state, slots in self._states:
                state[slots] = state[slots[::-1]]
        changed, self._struck = not self._struck, True
        return changed

    def undo(self) -> None:
        pass


@frozen
class Control:
    """A fault, and the models that can have it.

    Attributes:
        make: takes the engine, the requests of `CONTROL_PROMPTS`, all of whose prompts are computed, and a size.
        applies: whether a model has what the fault is about.
        sizes: how large the fault is made, the next one only where nothing gives the one before away.
    """

    make: Callable[[Engine, Sequence[Request], int], Fault]
    applies: Callable[[ModelGeometry], bool]
    sizes: tuple[int, ...] = (1,)

    def sizes_on(self, bench: Bench) -> Sequence[int]:
        """The sizes that the runtime has positions for; the smallest in any case."""
        room = bench.sizes.limits.max_context - max(CONTROL_PROMPTS) - CONTROL_NEW_TOKENS
        return [size for size in self.sizes if size <= max(room, self.sizes[0])]


def _attends(geometry: ModelGeometry) -> bool:
    return bool(geometry.attention_layers)


def _recurs(geometry: ModelGeometry) -> bool:
    return geometry.hybrid


CONTROLS: dict[str, Control] = {
    "swapped-page": Control(SwappedPage, _attends, PAGES),
    "shifted-position": Control(ShiftedPosition, _attends, SHIFTS),
    "stale-row": Control(StaleRow, _attends),
    "stale-state": Control(StaleState, _recurs),
    "swapped-slot": Control(SwappedSlot, _recurs),
}


def untouched(bench: Bench) -> Evidence:
    """What the controls tamper with, left alone: only beside this do they show anything."""
    return _serve(bench, None)


def tampered(bench: Bench, control: Control, size: int) -> Evidence:
    """The same with the fault at a size. Nothing of it is left in the runtime afterwards."""
    evidence = _serve(bench, control, size)
    bench.session()  # forgets the pages that were computed from it
    return evidence


@torch.inference_mode()
def _serve(bench: Bench, control: Control | None, size: int = 1) -> Evidence:
    session: Session = bench.session()
    engine = bench.runtime._engine
    requests = [session.submit(bench.prompt(tokens), CONTROL_NEW_TOKENS) for tokens in CONTROL_PROMPTS]
    strikes = 0
    fault: Fault | None = None
    try:
        while session.open:
            started = [r._scheduled.computed_tokens >= r._scheduled.prompt_tokens for r in requests]
            if control is not None and all(started) and not any(request.done for request in requests):
                fault = control.make(engine, requests, size) if fault is None else fault
                strikes += fault.strike()
            session.step()
        served: list[Served] = session.finish()
    finally:
        if fault is not None:
            fault.undo()
    faults = list(session.faults)
    if control is not None and not strikes:
        faults.append("the fault was never put in")
    return Evidence(served, faults, {"strikes": strikes, "size": size} if control is not None else {})


def _states(engine: Engine, slots: list[int]) -> list[tuple[torch.Tensor, list[int]]]:
    """Every recurrent and convolution state of the engine, with the slots in question."""
    pool = engine.state
    assert pool is not None
    layers = engine.blueprint.geometry.recurrent_layers
    return [(state, slots) for index in layers for state in (pool.recurrent(index), pool.tail(index))]
