"""Repetition, presence and frequency penalties, and the counts that they go by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from trivet.layout import Buffers


class PenaltyCounts:
    """Which tokens stand in the prompt and how often each stands in the output, by slot.

    Owns nothing: it views the buffers of `penalty_layout`. A slot's rows mean something only while it is bound to a
    request with penalties, and are cleared when one is bound: captured steps count tokens of every row.
    """

    def __init__(self, buffers: Buffers, vocabulary: int) -> None:
        self._in_prompt = buffers["in_prompt"].view(-1, vocabulary)
        self._output_counts = buffers["output_counts"].view(-1, vocabulary)
        self._flat_counts = buffers["output_counts"]
        self._vocabulary = vocabulary

    def start(self, slot: int, prompt: Tensor) -> None:
        """Begin a request in `slot`: its prompt (int64, on the buffers' device), and no output."""
        self._in_prompt[slot].fill_(False).index_fill_(0, prompt, True)
        self._output_counts[slot].zero_()

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Count one output token for each of `slots`, which may repeat; both int64 [rows]."""
        places = slots * self._vocabulary + tokens
        ones = torch.ones((), dtype=torch.int32, device=places.device).expand_as(places)
        self._flat_counts.scatter_add_(0, places, ones)

    def apply(self, logits: Tensor, slots: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
        """Penalised logits. Neutral parameters (1, 0, 0) change no bit of a row.

        Args:
            logits: float32 [rows, vocabulary]; overwritten.
            slots: int64 [rows].
            repetition, presence, frequency: float32 [rows].
        """
        counts = self._output_counts.index_select(0, slots)
        in_output = counts > 0
        seen = self._in_prompt.index_select(0, slots).logical_or_(in_output)
        masked_out = logits == -torch.inf
        repetition = repetition.unsqueeze(-1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        logits -= in_output * presence.unsqueeze(-1)
        logits -= counts * frequency.unsqueeze(-1)
        # An absurd penalty overflows; the row stays usable, and what the model ruled out stays ruled out.
        largest = torch.finfo(torch.float32).max
        return logits.clamp_(-largest, largest).masked_fill_(masked_out, -torch.inf)
