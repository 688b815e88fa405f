"""Steps of one short prompt as CUDA graphs: the host takes longer over the launches of an eager one than the device.

Each token of the prompt takes a decode row of the attention plans, with a context that ends at it; recurrent layers
take the tokens as the one row that they are, of one chunk whose length is read on the device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from trivet.ops.packed import PackedRows
from trivet.runtime.capture import WARM_UP_RUNS, CapturedPlans, GraphPool, padded
from trivet.runtime.inputs import PROMPT_TABLE, StepInputs
from trivet.scheduler.plan import StepPlan

if TYPE_CHECKING:
    from trivet.runtime.blueprint import Blueprint

Forward = Callable[[torch.Tensor, torch.Tensor, PackedRows], torch.Tensor]
"""From token ids ``[tokens]``, slots ``[1]`` and rows of a prompt to hidden states ``[tokens, hidden_size]``."""


@frozen(eq=False)
class PromptBucket:
    """The graph of one number of tokens.

    Attributes:
        tokens: of the captured step, padding tokens included.
        forward: from token ids to hidden states.
        hidden: ``[tokens, hidden_size]``, what `forward` writes.
    """

    tokens: int
    forward: torch.cuda.CUDAGraph
    hidden: torch.Tensor


READ_BYTES_PER_LAYER = 10**9
"""Keys and values that a device reads while the host launches the kernels of a layer one by one: a quarter of a
millisecond at 4 TB/s, where launches take 0.35 (dense) to 0.8 ms on an H200's host."""


class ShortPrompts:
    """One `PromptBucket` for each number of tokens that was captured; a prompt takes the smallest that holds it.

    What layers compute for padding tokens, which may be anything, reaches the padding page alone. Each token reads its
    whole context by itself, so that behind a long one the kernels are launched one by one after all.

    Args:
        plans: updated before each replay, outside the graph.
        inputs: where tokens, slot and chunks are read.
        page_size: tokens per page.
        padding_slot: a slot that no request is given.
        forward: what is captured.
        recurrent: whether there are recurrent layers, which are to take their rows by `ChunkTable` alone.
        most_read_tokens: tokens of context that all tokens of a prompt may read together; None for any number.
    """

    def __init__(
        self,
        plans: CapturedPlans,
        inputs: StepInputs,
        *,
        page_size: int,
        padding_slot: int,
        forward: Forward,
        recurrent: bool,
        most_read_tokens: int | None = None,
    ) -> None:
        self._plans = plans
        self._inputs = inputs
        self._page_size = page_size
        self._padding_slot = padding_slot
        self._forward = forward
        self._recurrent = recurrent
        self._most_read_tokens = most_read_tokens
        self._buckets: dict[int, PromptBucket] = {}
        self._sizes: tuple[int, ...] = ()

    @torch.inference_mode()
    def capture(self, tokens: int, pool: GraphPool) -> None:
        """Capture a step of so many tokens."""
        self._buckets[tokens] = self._captured(tokens, pool)
        self._sizes = tuple(sorted(self._buckets))

    def bucket_of(self, plan: StepPlan) -> PromptBucket | None:
        """The bucket that replays `plan`; None unless it is a piece of one prompt, short, not scored and not cut."""
        if plan.decode_rows or len(plan.requests) != 1 or plan.cuts or plan.requests[0].kind != "generate":
            return None
        tokens = plan.lengths[0]
        if not self._sizes or tokens > self._sizes[-1]:
            return None
        if self._most_read_tokens is not None and tokens * (plan.starts[0] + tokens) > self._most_read_tokens:
            return None
        return self._buckets[self._sizes[bisect_left(self._sizes, tokens)]]

    def replay(self, bucket: PromptBucket, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the forward of `plan`; hidden states, of which the prompt's tokens are the first, and its slot."""
        tokens, start = plan.lengths[0], plan.starts[0]
        kv_lengths = np.arange(start + 1, start + 1 + tokens, dtype=np.int32)
        page_counts = -(-kv_lengths // self._page_size)
        indptr = np.zeros(tokens + 1, dtype=np.int32)
        np.cumsum(page_counts, out=indptr[1:])
        pages = plan.page_indices
        self._plans.update(kv_lengths, indptr, np.concatenate([pages[:count] for count in page_counts]), bucket.tokens)
        slots = self._fill(plan.token_ids(), plan.slots, bucket.tokens)
        bucket.forward.replay()
        return bucket.hidden, slots

    def close(self) -> None:
        """Drop the graphs and their memory. Idempotent."""
        self._buckets = {}
        self._sizes = ()

    def _fill(self, token_ids: np.ndarray, slots: np.ndarray, tokens: int) -> torch.Tensor:
        if self._recurrent:
            values, _ = PackedRows((len(token_ids),)).table_values(0)
            self._inputs.fill(PROMPT_TABLE, values)
        self._inputs.fill("token_ids", padded(token_ids, tokens - len(token_ids), 0))
        return self._inputs.fill("slots", slots)

    def _captured(self, tokens: int, pool: GraphPool) -> PromptBucket:
        inputs = self._inputs
        rows = PackedRows((tokens,), inputs.device)
        if self._recurrent:
            _, shape = rows.table_values(0)
            rows = rows.with_table(shape.table(inputs[PROMPT_TABLE]))
        inputs.begin()
        self._plans.update_to_padding(tokens)
        slots = self._fill(np.zeros(tokens, dtype=np.int32), np.array([self._padding_slot]), tokens)
        inputs.end()
        torch.cuda.current_stream(inputs.device).synchronize()
        token_ids = inputs["token_ids"][:tokens]
        with torch.cuda.stream(pool.stream):
            for _ in range(WARM_UP_RUNS):
                self._forward(token_ids, slots, rows)
        pool.stream.synchronize()
        forward, hidden = pool.captured(lambda: self._forward(token_ids, slots, rows))
        self._plans.note_capture()
        return PromptBucket(tokens, forward, hidden)


def most_read_tokens(blueprint: Blueprint) -> int | None:
    """Tokens of context that the tokens of a prompt may read together before launches cost less.

    None where the tokens of a prompt read their contexts one by one anyway, or have none to read.
    """
    page_bytes = blueprint.kv(1).total_bytes - blueprint.kv(0).total_bytes
    if not page_bytes or blueprint.capacity.numeric_policy == "pinned":
        return None
    layers, page_size = len(blueprint.geometry.layers), blueprint.capacity.limits.page_size
    return layers * READ_BYTES_PER_LAYER * page_size // page_bytes
