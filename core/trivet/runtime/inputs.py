"""What the host tells the device of a step, and what the device tells the host: the layout, and the buffers in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trivet.capacity import RuntimeCapacity
from trivet.capacity.chunks import chunk_table_parts
from trivet.layout import BufferLayout, Buffers, BufferSpec
from trivet.layout.staging import STAGING_SETS, mirror_name, mirrors
from trivet.sampling.layout import VALUES_PER_SAMPLE

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

MIRRORED = ("token_ids", "slots", "sampled_tokens", "sampled_slots", "sampled_positions")
SAMPLES = "samples"
PROMPT_TABLE = "prompt_table"


def inputs_layout(capacity: RuntimeCapacity) -> BufferLayout:
    """Buffers of a step's inputs.

    - ``token_ids``: the step's tokens, row by row.
    - ``slots``: slot of each row.
    - ``sampled_tokens``, ``sampled_slots``, ``sampled_positions``: of each row that gives a new token, the token of
      the step whose logits are wanted, its slot, and the place that the new token takes.
    - ``samples``: the new tokens of a captured step and whether each row was unusable, as `SampleResult.packed` lays
      them out; on the device.
    - ``prompt_table``: where models have recurrent layers and short prompts are captured, the chunks of such a prompt.
    - ``slot_tokens``: the newest token of each slot, on the device alone: what a decode row of the next step computes,
      whether the host has seen it or not. The last slot is that of padding rows.

    On a CUDA device what the host fills has pinned mirrors in two sets, and each set has room for ``samples`` on their
    way back.
    """
    rows = capacity.step_rows
    mirrored = tuple(
        BufferSpec(name, capacity.step_tokens if name == "token_ids" else rows, "int64") for name in MIRRORED
    )
    samples = BufferSpec(SAMPLES, VALUES_PER_SAMPLE * rows, "int64")
    specs = [*mirrored, samples, BufferSpec("slot_tokens", capacity.limits.max_requests + 1, "int64")]
    refilled = [*mirrored]
    if capacity.prompt_buckets and capacity.geometry.hybrid:
        refilled.append(BufferSpec(PROMPT_TABLE, sum(chunk_table_parts(1, 1, 1)), "int64"))
        specs.append(refilled[-1])
    if capacity.device.kind == "cuda":
        specs += mirrors((*refilled, samples))
    return BufferLayout("step inputs", tuple(specs))


class StepInputs:
    """The buffers of `inputs_layout` in use. On a CUDA device nothing here waits for the device but `begin`.

    Args:
        buffers: allocated from the layout.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self.device: torch.device = buffers["token_ids"].device
        self._staged = mirror_name(SAMPLES, 0) in buffers
        self._set = 0
        self._sent: list[torch.cuda.Event | None] = [None] * STAGING_SETS
        buffers["slot_tokens"].zero_()
        buffers[SAMPLES].zero_()  # token ids, which nobody has sampled yet

    def __getitem__(self, name: str) -> Tensor:
        """A buffer by name."""
        return self._buffers[name]

    def begin(self) -> None:
        """Start on the next step's inputs, once the device has read those of the step before the last."""
        if self._staged:
            self._set = (self._set + 1) % STAGING_SETS
            sent = self._sent[self._set]
            if sent is not None:
                sent.synchronize()

    def fill(self, name: str, values: NDArray[Any]) -> Tensor:
        """Copy `values` to the front of a buffer, in its dtype; returns the part that they fill."""
        if not self._staged:
            return self._buffers.fill(name, values)
        staged = self._buffers.fill(mirror_name(name, self._set), values)
        filled = self._buffers[name][: len(values)]
        filled.copy_(staged, non_blocking=True)
        return filled

    def fetch(self, values: Tensor) -> Tensor:
        """`values`, int64, on the host. On a CUDA device they are there once `end`'s event has passed.

        Two values of each row go through the pinned buffer of the set in use. What is longer, since log-probabilities
        were asked for, goes through pinned memory that torch keeps for the purpose.
        """
        if not self._staged:
            return values
        staged = self._buffers[mirror_name(SAMPLES, self._set)]
        if len(values) > len(staged):
            return values.to("cpu", non_blocking=True)
        fetched = staged[: len(values)]
        fetched.copy_(values, non_blocking=True)
        return fetched

    def end(self) -> torch.cuda.Event | None:
        """Mark the end of the step in the device's work; None on a device that has done it already."""
        if not self._staged:
            return None
        import torch

        event = self._sent[self._set]
        if event is None:
            event = self._sent[self._set] = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event
