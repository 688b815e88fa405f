"""What a request gives back."""

from __future__ import annotations

from attrs import frozen

from trivet.sampling.logprobs import TokenLogprob


@frozen
class Timings:
    """Where a request's time went, in milliseconds.

    Attributes:
        queue_ms: from submission to admission.
        ttft_ms: from submission to the first token; None before there is one.
        tpot_ms: mean time per output token after the first; None with fewer than two.
    """

    queue_ms: float
    ttft_ms: float | None
    tpot_ms: float | None


@frozen
class Completion:
    """The answer to one request. Does not change once the request is done.

    Attributes:
        token_ids: new tokens, with the end token that ended the request.
        text: their text, without end tokens and without a stop string.
        finish_reason: ``"stop"``, ``"length"``, ``"cancelled"`` or ``"error"``.
        error: the cause where the reason is ``"error"``; None otherwise.
        logprobs: one entry per new token if `Sampling.logprobs` asked for them; None otherwise.
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        timings: where the time went.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    error: BaseException | None
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_tokens: int
    cached_tokens: int
    timings: Timings


@frozen
class Token:
    """One streamed token.

    Attributes:
        token_id: its id.
        text: text that is certain now; empty while it could still become a character or a stop string.
        logprob: its log-probability if asked for; None otherwise.
        finish_reason: None except on the last token of the request.
    """

    token_id: int
    text: str
    logprob: TokenLogprob | None
    finish_reason: str | None
