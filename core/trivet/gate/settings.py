"""What one run of the gate is asked to do, and the sizes that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from trivet.capacity import Limits
from trivet.errors import ConfigError
from trivet.geometry import ModelGeometry

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
STEP_TOKENS = {"cpu": 64, "cuda": 1024}
"""Tokens that one step may compute, by kind of device, without long prompts."""
LONG_STEP_TOKENS = 4096
PAGE_SIZE = 16
DECODES_BEFORE_DROP = 3
"""Steps in which a whole batch decodes before one of its requests is dropped."""
MIXED_DECODES = 3
"""Requests that decode while a prompt is computed in chunks."""


def together_tokens(new_tokens: int, prompt_tokens: Sequence[int], step_tokens: int) -> int:
    """New tokens of each of several requests, so that the first still decodes when the last has joined.

    Args:
        step_tokens: of one step, at least one for each request: those that decode take one each from the prompts.
    """
    left_tokens = step_tokens - len(prompt_tokens) + 1
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


@frozen
class Sizes:
    """What the passes need of the runtime.

    Attributes:
        limits: of the runtime.
        kv_pages: pages that hold the largest pass.
        mixed_prompt_tokens: a prompt that takes three steps beside decodes.
        warm_prompt_tokens: a prompt with two whole grains of the prefix cache in it; 0 without a prefix cache.
    """

    limits: Limits
    kv_pages: int
    mixed_prompt_tokens: int
    warm_prompt_tokens: int

    @classmethod
    def of(cls, settings: GateSettings, geometry: ModelGeometry, device: str, grain_tokens: int) -> Sizes:
        """The sizes for a model on a kind of device, ``"cpu"`` or ``"cuda"``.

        Raises:
            ConfigError: the model has too few positions for what is asked, or the limits leave no room for the passes.
        """
        asked = dict(settings.load.get("limits", {}))
        page_size = asked.get("page_size", PAGE_SIZE)
        step_tokens = LONG_STEP_TOKENS if settings.long else min(STEP_TOKENS[device], geometry.max_positions // 4)
        step_tokens = asked.get("max_step_tokens", step_tokens)
        mixed = 2 * step_tokens + step_tokens // 4 + 1
        warm = 2 * grain_tokens + 5 if settings.load.get("prefix_cache", True) else 0
        beside_long = [*LONG_PROMPTS, *[BATCHED_PROMPTS[1]] * MIXED_DECODES] if settings.long else []
        rows = max(*settings.batches, MIXED_DECODES + 1, len(CONTROL_PROMPTS), len(beside_long))
        for limit, found in (("max_step_tokens", step_tokens), ("max_requests", asked.get("max_requests", rows))):
            if found < rows:
                raise ConfigError(
                    f"the gate serves up to {rows} requests side by side, and {limit} is {found}: raise it"
                    f"{', or lower --batch' if rows in settings.batches else ''}"
                )
        together = [[BATCHED_PROMPTS[1]] * rows, beside_long]
        new_tokens = max(together_tokens(settings.new_tokens, prompts, step_tokens) for prompts in together)
        new_tokens += DECODES_BEFORE_DROP
        longest = max(mixed, warm, *SEQUENTIAL_PROMPTS, *(LONG_PROMPTS if settings.long else ())) + new_tokens
        if longest > asked.get("max_context", geometry.max_positions):
            fewer = "--max-context gives" if "max_context" in asked else "the model has positions for"
            what, advice = (
                f"a prompt of {mixed} is computed in steps of at most {step_tokens}",
                "lower --max-step-tokens",
            )
            if warm > mixed:
                what = f"a prompt of {warm} has two grains of the prefix cache in it, of {grain_tokens} tokens each"
                advice = "lower --snapshot-stride" if geometry.hybrid else "lower --page-size"
            elif new_tokens > mixed:
                what = f"{rows} requests decode side by side after prompts in steps of at most {step_tokens}"
                advice = "raise --max-step-tokens"
            raise ConfigError(
                f"the gate needs a context of {longest} tokens ({what}), and {fewer} "
                f"{asked.get('max_context', geometry.max_positions)}: "
                f"{'raise it, ' if 'max_context' in asked else ''}{advice}"
                f"{', or leave out --long' if settings.long else ''}"
            )
        limits = {
            "max_requests": 1 << (rows - 1).bit_length(),
            "max_step_tokens": step_tokens,
            "max_context": -(-longest // page_size) * page_size,
            "page_size": page_size,
            **asked,
        }

        def pages(*prompt_tokens: int) -> int:
            return sum(-(-(tokens + new_tokens) // page_size) for tokens in prompt_tokens)

        most = max(
            pages(*[BATCHED_PROMPTS[1]] * (rows + 1)),
            pages(mixed, *[BATCHED_PROMPTS[1]] * MIXED_DECODES),
            pages(warm, warm, warm),
            pages(*beside_long),
        )
        if settings.load.get("kv_pages", most) < most:
            raise ConfigError(
                f"the gate serves requests that hold up to {most} pages of {page_size} tokens at once, and kv_pages is "
                f"{settings.load['kv_pages']}: raise it, or leave it out"
            )
        return cls(Limits(**limits), most + most // 4 + 8, mixed, warm)
