"""What one run of the gate is asked to do, and what its passes have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

FLOOR_PASS = "sequential"
"""The pass on whose sequences the floor of the model is measured."""
SEQUENTIAL_PROMPTS = (1, 2, 15, 16, 17, 40, 64, 100, 128)
"""Tokens of the prompts that are served one at a time: 1 to 128, around the ends of pages."""
BATCHED_PROMPTS = (3, 128)
"""Least and most tokens of the prompts that are served side by side."""
LONG_PROMPTS = (4097, 8192)
CONTROL_PROMPTS = (6, 37, 45, 90)
"""Tokens of the prompts that the controls tamper with: a short one, two of more than two pages, a long one."""
CONTROL_NEW_TOKENS = 14
LEAST_NEW_TOKENS = 8
LONG_CONTROL_PROMPTS = (LONG_PROMPTS[0], BATCHED_PROMPTS[1])
"""Tokens of the prompts that the controls of a run with long prompts tamper with; only the first is judged."""
DECODES_BEFORE_DROP = 3
"""Steps in which a whole batch decodes before one of its requests is dropped."""
MIXED_DECODES = 3
"""Requests that decode while a prompt is computed in chunks."""
MIXED_NEW_TOKENS = 10
"""Least new tokens of each of those."""
WARM_DECODES = (5, 9)
"""Tokens of the prompts that decode while another starts from the prefix cache."""
WARM_MORE_TOKENS = 4
"""New tokens that those have beyond what is asked for."""
WARM_TAILS = (5, 7)
"""Most tokens behind two grains of the prefix cache: of the prompt that is served twice, and of one like it."""


def together_tokens(new_tokens: int, prompt_tokens: Sequence[int], step_tokens: int) -> int:
    """New tokens of each of several requests, so that the first still decodes when the last has joined.

    Args:
        step_tokens: of one step. Those that decode take one each from the prompts; with fewer than there are requests
            they never come to decode together, and the number says nothing.
    """
    left_tokens = max(1, step_tokens - len(prompt_tokens) + 1)
    return max(new_tokens, sum(prompt_tokens) // left_tokens + LEAST_NEW_TOKENS)


@frozen
class GateSettings:
    """What is asked.

    Attributes:
        checkpoint: a directory, or the name of a shipped model or geometry.
        load: further arguments of `Runtime.load`; limits as a mapping of those that were asked for.
        reference: ``"tensors"``: transformers over the runtime's own parameters; ``"files"``: over the checkpoint's
            files, read by transformers, so that the loader is under test too.
        batches: how many requests are served at once, one batched pass for each.
        new_tokens: of each request.
        long: whether prompts of `LONG_PROMPTS` tokens are served too.
        passes: names of the passes to run; empty for all.
        controls: whether faults are put in on purpose.
        floor: whether the reference is also held against itself in a wider dtype, where that fits.
        seed: of the prompts.
    """

    checkpoint: str
    load: Mapping[str, Any]
    reference: str
    batches: tuple[int, ...]
    new_tokens: int
    long: bool
    passes: tuple[str, ...]
    controls: bool
    floor: bool
    seed: int
