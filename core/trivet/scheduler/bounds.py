"""How long anything can take, in steps: what the scheduler promises, and tests hold it to."""

from __future__ import annotations

from collections.abc import Iterable

from trivet.capacity import Limits
from trivet.capacity.chunks import MOST_CUTS_PER_ROW
from trivet.checked import ceil_div
from trivet.errors import ConfigError
from trivet.scheduler.request import lifetime_tokens

SNAPSHOT_PAUSES = MOST_CUTS_PER_ROW
"""Places inside one prompt where prefill stops for a snapshot: a branch point, and the last boundary."""


def progress_bound_steps(limits: Limits, *, chunked_prefill: bool = True, mixed_steps: bool = True) -> int:
    """Steps within which every running row advances, prefilling ones included.

    With R rows (``max_requests``) and T tokens (``max_step_tokens``):

    - Chunked prefill and mixed steps: 1 while T is at least the number of running rows. Decode rows take one token
      each, and a prefilling row leaves one token to each that came after it. With more rows than T, the T least
      recently served rows advance by one token each. A served or new row queues behind all others, so that the rows
      before any one row only become fewer, by T a step: ceil(R / T).
    - No mixed steps: the least recently served row says which kind is served. Rows of either kind before a given row
      become fewer by T whenever their kind is served, and a kind is served only while its row is first:
      ceil(R / T) + 1.
    - No chunked prefill: every step serves the least recently served row at least: R.

    Where prompts are cut on a grid, this holds of decode rows and of the oldest prefilling row.
    """
    if not chunked_prefill:
        return limits.max_requests
    turns = ceil_div(limits.max_requests, limits.max_step_tokens)
    return turns if mixed_steps else turns + 1


def drain_bound_steps(
    requests: Iterable[tuple[int, int]], max_step_tokens: int, *, snapshots: bool = False, grid_tokens: int = 1
) -> int:
    """Steps within which a queue is drained, whatever the pages, the slots and the order of arrival.

    Args:
        requests: ``(prompt_tokens, max_new_tokens)`` of each request, with 0 new tokens for ``"score"``.
        max_step_tokens: tokens that one step may compute (T).
        snapshots: whether prefill stops at snapshot boundaries.
        grid_tokens: at whose multiples prompts are cut (G).

    A step either computes at least T - G + 1 tokens or leaves G of them. There are at most
    ``floor(W / (T - G + 1))`` of the first sort, with W the tokens of all lifetimes, since no token is computed twice.

    A step of the second sort had tokens left for every row that it serves, so each of these rows decoded one token or
    finished its piece of prefill. Charge the step to the oldest of them. (There is one: with nothing running, every
    page that a waiting request does not share is free or evictable, and the gate has let in only what fits the pool.)
    A request is charged at most once for each piece of its prompt, of which there are ``1 + SNAPSHOT_PAUSES`` with
    snapshots and 1 without, and once for each new token but the first.
    """
    work_tokens = 0
    charges = 0
    for prompt_tokens, max_new_tokens in requests:
        work_tokens += lifetime_tokens(prompt_tokens, max_new_tokens)
        charges += max(max_new_tokens, 1) + (SNAPSHOT_PAUSES if snapshots else 0)
    return work_tokens // (max_step_tokens - grid_tokens + 1) + charges


def check_grid(limits: Limits, grain_tokens: int, grid_tokens: int) -> None:
    """Raise `ConfigError` unless the oldest prompt advances in every step, and prefix-cache hits end on the grid.

    Args:
        grain_tokens: of the prefix cache.
        grid_tokens: at whose multiples prompts are cut; 1 for anywhere.
    """
    least = limits.max_requests - 1 + grid_tokens
    if grid_tokens > 1 and limits.max_step_tokens < least:
        raise ConfigError(
            f"max_step_tokens is {limits.max_step_tokens}, expected at least {least}: under numeric_policy='pinned' "
            f"prompts are cut at multiples of {grid_tokens} tokens, and one such piece is to fit beside the other "
            f"{limits.max_requests - 1} requests"
        )
    if grain_tokens % grid_tokens:
        raise ConfigError(
            f"snapshot_stride is {grain_tokens}, expected a multiple of {grid_tokens}, at which prompts are cut under "
            "numeric_policy='pinned'"
        )
