"""The one gate that every request passes: can it ever be served, and does it fit now."""

from __future__ import annotations

from trivet.capacity import Limits
from trivet.checked import ceil_div
from trivet.errors import AccountingError, RequestRejected
from trivet.scheduler.request import Kind, lifetime_tokens


class AdmissionGate:
    """Full-lifetime admission, in pages.

    An admitted request takes its pages as it grows; what it may still take stays reserved here. A request is
    admitted only if its new pages fit what is free or evictable beside all reservations, so that taking a page while
    serving cannot fail.

    Args:
        limits: what the operator allows.
        pages_total: pages of the pool.
        chunked_prefill: whether a prompt may be computed in pieces. If not, it must fit one step.

    Attributes:
        reserved_pages: pages that admitted requests may still take.
    """

    def __init__(self, limits: Limits, pages_total: int, *, chunked_prefill: bool = True) -> None:
        self.limits = limits
        self.pages_total = pages_total
        self.chunked_prefill = chunked_prefill
        self.reserved_pages = 0

    def check(self, prompt_tokens: int, max_new_tokens: int | None, kind: Kind = "generate") -> int:
        """Refuse a request that could never be served, whatever is free now. Thread-safe: reads constants only.

        Args:
            prompt_tokens: tokens of the prompt.
            max_new_tokens: most new tokens, or None for as many as the context and the pool can ever hold. Ignored
                for ``"score"``.

        Returns:
            The number of new tokens that are allowed; 0 for ``"score"``.

        Raises:
            RequestRejected: with the numbers. Nothing was changed.
        """
        limits = self.limits
        if prompt_tokens < 1:
            raise RequestRejected("the prompt is empty: expected at least one token")
        if not self.chunked_prefill and prompt_tokens > limits.max_step_tokens:
            raise RequestRejected(
                f"the prompt has {prompt_tokens} tokens and this model computes prompts whole: at most max_step_tokens "
                f"({limits.max_step_tokens}) tokens are served; raise that limit or shorten the prompt"
            )
        if kind == "score":
            max_new_tokens = 0
        elif max_new_tokens is None:
            max_new_tokens = max(1, min(limits.max_context, self.pages_total * limits.page_size + 1) - prompt_tokens)
        elif max_new_tokens < 1:
            raise RequestRejected(f"max_new_tokens is {max_new_tokens}, expected at least 1")
        if prompt_tokens + max_new_tokens > limits.max_context:
            raise RequestRejected(
                f"{prompt_tokens} prompt tokens and {max_new_tokens} new tokens are "
                f"{prompt_tokens + max_new_tokens}, more than max_context ({limits.max_context} tokens): shorten the "
                f"prompt or lower max_new_tokens"
            )
        lifetime = lifetime_tokens(prompt_tokens, max_new_tokens)
        pages = self.pages(lifetime)
        if pages > self.pages_total:
            raise RequestRejected(
                f"{prompt_tokens} prompt tokens and {max_new_tokens} new tokens need {pages} KV pages of "
                f"{limits.page_size} tokens over their lifetime ({lifetime} tokens), the pool has {self.pages_total} "
                f"in all: shorten the prompt, lower max_new_tokens or raise kv_pages"
            )
        return max_new_tokens

    def pages(self, tokens: int) -> int:
        """Whole pages that hold `tokens`."""
        return ceil_div(tokens, self.limits.page_size)

    def fits(self, new_pages: int, free_pages: int, cached_pages: int) -> bool:
        """Whether a request that will take `new_pages` fits beside all that is reserved.

        Args:
            free_pages: pages that nobody owns.
            cached_pages: evictable pages, counted after the request has pinned those that it shares.
        """
        return new_pages <= free_pages + cached_pages - self.reserved_pages

    def reserve(self, pages: int) -> None:
        """Set `pages` aside for a request that is admitted."""
        self.reserved_pages += pages

    def release(self, pages: int) -> None:
        """End the reservation of `pages`: they were taken, or will not be."""
        if pages > self.reserved_pages:
            raise AccountingError(f"admission: {pages} reserved pages to release, {self.reserved_pages} are reserved")
        self.reserved_pages -= pages
