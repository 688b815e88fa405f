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
from trivet.gate.settings import (
    CONTROL_NEW_TOKENS,
    CONTROL_PROMPTS,
    LEAST_NEW_TOKENS,
    LONG_CONTROL_PROMPTS,
    together_tokens,
)
from trivet.geometry import ModelGeometry

if TYPE_CHECKING:
    from trivet.runtime.engine import Engine
    from trivet.runtime.handle import Request

SHORT, FIRST, SECOND = 0, 1, 2
"""Which of the requests that a fault is given it is put into."""
SHIFTS, PAGES = (1, 16, 256, 1024), (1, 2)
"""Random weights have no sense of neighbouring positions, least of all where few layers attend and few entries rotate:
there a shift by one may drown in the rounding of bfloat16, and a larger one is tried. What was needed is reported."""
PARTS_TOKENS = (256, 1024, 4096)
"""How much of a long row is made wrong: among thousands of right keys, a page of wrong ones may not show."""


@frozen
class Subjects:
    """The requests that faults are put into.

    Attributes:
        prompts: tokens of each one's prompt.
        stand_ins: which of them is `SHORT`, `FIRST` and `SECOND` for a fault; one may be several.
        judged: which of them are held against the reference.
        new_tokens: of each, at least.
    """

    prompts: tuple[int, ...]
    stand_ins: tuple[int, int, int]
    judged: tuple[int, ...]
    new_tokens: int

    def new_tokens_on(self, bench: Bench) -> int:
        """New tokens with which all of them come to decode side by side."""
        return together_tokens(self.new_tokens, self.prompts, bench.sizes.limits.max_step_tokens)


SHORT_PROMPTS = Subjects(CONTROL_PROMPTS, (0, 1, 2), tuple(range(len(CONTROL_PROMPTS))), CONTROL_NEW_TOKENS)
ONE_LONG_PROMPT = Subjects(LONG_CONTROL_PROMPTS, (0, 0, 1), (0,), LEAST_NEW_TOKENS)
"""Faults that are put into the long row, and only what is said of that row counts."""


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


class StrayPage:
    """The first pages of a row, `size` tokens of it, hold what one page of another row does, once, in every layer."""

    def __init__(self, engine: Engine, requests: Sequence[Request], size: int) -> None:
        self._engine = engine
        first, page_size = requests[FIRST]._scheduled, engine.blueprint.capacity.limits.page_size
        self._to = list(first.pages[: max(1, min(size, first.prompt_tokens) // page_size)])
        self._of = requests[SECOND]._scheduled.pages[0]
        self._struck = False

    def strike(self) -> bool:
        if not self._struck:
            for index in self._engine.blueprint.geometry.attention_layers:
                for cache in self._engine.cache.layer(index):
                    cache[self._to] = cache[self._of].clone()
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
    """The last `size` keys and values of a row, up to what it has just appended, are lost: its first stand there."""

    def __init__(self, engine: Engine, requests: Sequence[Request], size: int) -> None:
        self._engine = engine
        self._request = requests[SHORT]._scheduled
        self._size = size

    def strike(self) -> bool:
        request, page_size = self._request, self._engine.blueprint.capacity.limits.page_size
        last = request.computed_tokens - 1
        if last < request.prompt_tokens:
            return False
        lost = range(max(1, last - self._size + 1), last + 1)
        places = [(request.pages[token // page_size], token % page_size) for token in lost]
        pages, offsets = torch.tensor(places, device=self._engine.inputs.device).unbind(1)
        for index in self._engine.blueprint.geometry.attention_layers:
            for cache in self._engine.cache.layer(index):
                cache[pages, offsets] = cache[request.pages[0], 0].clone()
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
        make: takes the engine, the requests that stand for `SHORT`, `FIRST` and `SECOND`, all of whose prompts are
            computed, and a size.
        applies: whether a model has what the fault is about.
        sizes: how large the fault is made, the next one only where nothing gives the one before away.
        subjects: what it is put into.
    """

    make: Callable[[Engine, Sequence[Request], int], Fault]
    applies: Callable[[ModelGeometry], bool]
    sizes: tuple[int, ...] = (1,)
    subjects: Subjects = SHORT_PROMPTS

    def sizes_on(self, bench: Bench) -> Sequence[int]:
        """The sizes that the runtime has positions for; the smallest in any case."""
        room = bench.sizes.limits.max_context - max(self.subjects.prompts) - self.subjects.new_tokens_on(bench)
        return [size for size in self.sizes if size <= max(room, self.sizes[0])]


def _attends(geometry: ModelGeometry) -> bool:
    return bool(geometry.attention_layers)


def _recurs(geometry: ModelGeometry) -> bool:
    return geometry.hybrid


def _only_attends(geometry: ModelGeometry) -> bool:
    return not geometry.hybrid


CONTROLS: dict[str, Control] = {
    "swapped-page": Control(SwappedPage, _attends, PAGES),
    "shifted-position": Control(ShiftedPosition, _attends, SHIFTS),
    "stale-row": Control(StaleRow, _attends),
    "stale-state": Control(StaleState, _recurs),
    "swapped-slot": Control(SwappedSlot, _recurs),
}
LONG_CONTROLS: dict[str, Control] = {
    "long-stray-page": Control(StrayPage, _attends, PARTS_TOKENS, ONE_LONG_PROMPT),
    "long-shifted-position": Control(ShiftedPosition, _only_attends, SHIFTS, ONE_LONG_PROMPT),
    "long-stale-row": Control(StaleRow, _attends, PARTS_TOKENS, ONE_LONG_PROMPT),
    "long-stale-state": Control(StaleState, _recurs, (1,), ONE_LONG_PROMPT),
    "long-swapped-slot": Control(SwappedSlot, _recurs, (1,), ONE_LONG_PROMPT),
}
"""Those of a run with long prompts, beside the others: a fault that shows in a short row need not in a long one.

A shift makes scores others, and does not grow with the row. Over thousands of keys of random weights other scores give
nearly the same mean of the values: where few layers attend, no shift of up to 4,000 was surely beyond the rounding of
bfloat16. So models with recurrent layers show it in short rows alone.
"""


def untouched(bench: Bench) -> Evidence:
    """What the controls tamper with, left alone: only beside this do they show anything."""
    return _serve(bench, None)


def long_untouched(bench: Bench) -> Evidence:
    """The same for the controls of long prompts."""
    return _serve(bench, None, subjects=ONE_LONG_PROMPT)


def tampered(bench: Bench, control: Control, size: int) -> Evidence:
    """The same with the fault at a size. Nothing of it is left in the runtime afterwards."""
    evidence = _serve(bench, control, size, control.subjects)
    bench.session()  # forgets the pages that were computed from it
    return evidence


@torch.inference_mode()
def _serve(bench: Bench, control: Control | None, size: int = 1, subjects: Subjects = SHORT_PROMPTS) -> Evidence:
    session: Session = bench.session()
    engine, new_tokens = bench.runtime._engine, subjects.new_tokens_on(bench)
    requests = [session.submit(bench.prompt(tokens), new_tokens) for tokens in subjects.prompts]
    strikes = 0
    fault: Fault | None = None
    try:
        while session.open:
            started = [r._scheduled.computed_tokens >= r._scheduled.prompt_tokens for r in requests]
            if control is not None and all(started) and not any(request.done for request in requests):
                stand_ins = [requests[row] for row in subjects.stand_ins]
                fault = control.make(engine, stand_ins, size) if fault is None else fault
                strikes += fault.strike()
            session.step()
        lengths = {subjects.prompts[row] for row in subjects.judged}
        served: list[Served] = [one for one in session.finish() if len(one.prompt) in lengths]
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
