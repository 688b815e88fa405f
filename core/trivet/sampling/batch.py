"""The sampler's state: what each slot's request asks for, on the device, and which rows need which work."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from trivet.ops.transfer import to_device
from trivet.sampling.noise import token_hashes
from trivet.sampling.params import Sampling
from trivet.sampling.penalties import PenaltyCounts

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from trivet.layout import Buffers

_FLOAT32 = torch.finfo(torch.float32)


class Choice(IntEnum):
    """How a row's token is chosen, by cost: nothing drawn, nothing ordered, k ordered, all ordered."""

    GREEDY = 0
    DRAWN = 1
    AMONG_FIRST = 2
    NUCLEUS = 3


@frozen(eq=False)
class RowGroup:
    """Rows of a step that are sampled alike.

    Attributes:
        choice: how their token is chosen.
        penalised: whether tokens seen before change their logits.
        rows: int64 on the device.
        candidates: for `Choice.AMONG_FIRST`, the largest top-k among them.
    """

    choice: Choice
    penalised: bool
    rows: Tensor
    candidates: int


@frozen(eq=False)
class SampleGroups:
    """Which rows of a step need more than an argmax. Valid as long as its slots stay bound as they are.

    Attributes:
        special: disjoint groups; rows in none of them are greedy and unpenalised.
        penalised_rows: int64 on the device, the rows whose tokens have to be counted; None if there are none.
        scored_rows: int64 on the device, the rows that report log-probabilities; None if there are none.
        scored: the same rows on the host, each with its number of alternatives.
    """

    special: tuple[RowGroup, ...] = ()
    penalised_rows: Tensor | None = None
    scored_rows: Tensor | None = None
    scored: tuple[tuple[int, int], ...] = ()

    @property
    def only_drawn(self) -> bool:
        """Whether `Choice.DRAWN` without penalties is the most that any row needs."""
        return all(group.choice is Choice.DRAWN and not group.penalised for group in self.special)


PLAIN = SampleGroups()
"""Every row greedy, nothing penalised, nothing reported."""


class SamplingBatch:
    """What the requests in the sampling slots ask for; owned by the runtime, one per device.

    Slots are numbered as `sampler_layout` says; the last is for padding rows and is always greedy. Parameters
    stand in the buffers; a host copy of what decides the work to be done saves reading them back.

    Args:
        buffers: of `sampler_layout`.
        penalties: of `penalty_layout` for the same slots and vocabulary.
    """

    def __init__(self, buffers: Buffers, penalties: Buffers) -> None:
        self._buffers = buffers
        self.vocabulary = buffers.layout.spec("token_hashes").elements
        self.padding_slot = buffers.layout.spec("seed").elements - 1
        self.device = buffers["seed"].device
        self.penalties = PenaltyCounts(penalties, self.vocabulary)
        buffers["token_hashes"].copy_(token_hashes(self.vocabulary, self.device))
        neutral = _device_values(Sampling(), 0, self.vocabulary)
        for name, value in neutral.items():
            buffers[name].fill_(value)
        slots = self.padding_slot + 1
        self._written: dict[int, dict[str, float | int]] = {}  # what stands in each slot, where it is not neutral
        self._neutral = neutral
        self._choices = np.zeros(slots, dtype=np.int64)
        self._penalised = np.zeros(slots, dtype=np.bool_)
        self._top_k = np.zeros(slots, dtype=np.int64)
        self._scored = np.full(slots, -1, dtype=np.int64)
        self._demanding: set[int] = set()

    def __getitem__(self, name: str) -> Tensor:
        """A buffer of `sampler_layout`."""
        return self._buffers[name]

    def bind(self, slot: int, sampling: Sampling, prompt_ids: Sequence[int], seed: int = 0) -> None:
        """Give `slot` to a request.

        Args:
            slot: from 0; not the padding slot.
            sampling: what it asks for.
            prompt_ids: its prompt, within the vocabulary; read only if it has penalties.
            seed: used where `sampling` has none (see `derive_seed`); any integer, taken modulo 2**64.
        """
        if not 0 <= slot < self.padding_slot:
            raise IndexError(f"sampling slot {slot}: expected 0 to {self.padding_slot - 1}")
        values = _device_values(sampling, seed, self.vocabulary)
        # Most requests ask for what the one before them did, and each write is a kernel of its own.
        written = self._written.setdefault(slot, dict(self._neutral))
        for name, value in values.items():
            if written.get(name) != value:
                written.pop(name, None)  # a write that fails leaves nobody knowing
                self._buffers[name][slot] = value
                written[name] = value
        if sampling.needs_penalties:
            prompt = to_device(torch.as_tensor(prompt_ids, dtype=torch.int64), self.device)
            self.penalties.start(slot, prompt)
        scored = -1 if sampling.logprobs is None else min(sampling.logprobs, self.vocabulary)
        self._note(slot, _choice(sampling), sampling.needs_penalties, int(values["top_k"]), scored)

    def release(self, slot: int) -> None:
        """Take `slot` back. Its rows count as greedy until it is bound again; a free slot may be released."""
        self._note(slot, Choice.GREEDY, False, 0, -1)

    def groups(self, slots: Sequence[int] | NDArray[np.integer] | Tensor, *, on_device: bool = True) -> SampleGroups:
        """Which rows of a step need which work.

        Worth keeping over steps with the same rows. Reads `slots` on the host: give a list, an array or a CPU tensor.

        Args:
            slots: the slot of each row, [rows].
            on_device: whether `sample` will work by them; otherwise they only tell what is asked, and their rows stay
                on the host.
        """
        if not self._demanding:
            return PLAIN
        device = self.device if on_device else torch.device("cpu")
        places = np.asarray(slots.cpu() if isinstance(slots, torch.Tensor) else slots, dtype=np.int64)
        kinds = self._choices[places] * 2 + self._penalised[places]
        special = []
        for kind in sorted(set(kinds.tolist())):
            if kind:
                rows = np.flatnonzero(kinds == kind)
                special.append(
                    RowGroup(
                        choice=Choice(kind // 2),
                        penalised=bool(kind % 2),
                        rows=to_device(torch.from_numpy(rows), device),
                        candidates=int(self._top_k[places[rows]].max()),
                    )
                )
        scored = self._scored[places]
        scored_rows = np.flatnonzero(scored >= 0)
        return SampleGroups(
            special=tuple(special),
            penalised_rows=_rows_on(device, np.flatnonzero(self._penalised[places])),
            scored_rows=_rows_on(device, scored_rows),
            scored=tuple(zip(scored_rows.tolist(), scored[scored_rows].tolist(), strict=True)),
        )

    def any_groups(self, rows: int) -> SampleGroups:
        """Groups under which `rows` rows of any slots are sampled rightly, with the same work always.

        For CUDA graphs, whose work is fixed when they are captured. Draws the same tokens as `groups` would;
        reports no log-probabilities.
        """
        every = torch.arange(rows, device=self.device)
        general = RowGroup(Choice.NUCLEUS, True, every, self.vocabulary)
        return SampleGroups(special=(general,), penalised_rows=every)

    def drawn_groups(self, rows: int) -> SampleGroups:
        """The same for rows of which none needs more than `Choice.DRAWN`, and none has penalties."""
        every = torch.arange(rows, device=self.device)
        return SampleGroups(special=(RowGroup(Choice.DRAWN, False, every, self.vocabulary),))

    def accept(self, slots: Tensor, token_ids: Tensor, groups: SampleGroups | None = None) -> None:
        """Count the tokens that the rows' requests were given, for their later steps.

        Args:
            slots: int64 [rows], on the device.
            token_ids: int64 [rows], on the device.
            groups: as given to `sample` for these rows; None works them out.
        """
        rows = (self.groups(slots) if groups is None else groups).penalised_rows
        if rows is not None:
            self.penalties.add(slots[rows].to(torch.int64), token_ids[rows])

    def _note(self, slot: int, choice: Choice, penalised: bool, top_k: int, scored: int) -> None:
        self._choices[slot] = int(choice)
        self._penalised[slot] = penalised
        self._top_k[slot] = top_k
        self._scored[slot] = scored
        if choice or penalised or scored >= 0:
            self._demanding.add(slot)
        else:
            self._demanding.discard(slot)


def _rows_on(device: torch.device, rows: NDArray[np.int64]) -> Tensor | None:
    return to_device(torch.from_numpy(rows), device) if len(rows) else None


def _device_values(sampling: Sampling, seed: int, vocabulary: int) -> dict[str, float | int]:
    """What stands in the buffers of `sampler_layout` for a request."""
    return {
        # A temperature that float32 has no number for must become neither greedy nor infinite.
        "temperature": 0.0 if sampling.greedy else _in_float32(sampling.temperature),
        "top_k": min(sampling.top_k, vocabulary),
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": _in_float32(sampling.repetition_penalty),
        "presence_penalty": _within_float32(sampling.presence_penalty),
        "frequency_penalty": _within_float32(sampling.frequency_penalty),
        "seed": 0 if sampling.greedy else _as_int64(seed if sampling.seed is None else sampling.seed),
    }


def _choice(sampling: Sampling) -> Choice:
    if sampling.greedy:
        return Choice.GREEDY
    if sampling.top_k > 0:
        return Choice.AMONG_FIRST
    return Choice.NUCLEUS if sampling.needs_ranking else Choice.DRAWN


def _in_float32(value: float) -> float:
    """The nearest normal positive number of float32."""
    return min(max(value, _FLOAT32.tiny), _FLOAT32.max)


def _within_float32(value: float) -> float:
    return min(max(value, -_FLOAT32.max), _FLOAT32.max)


def _as_int64(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
