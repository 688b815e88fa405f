"""What a request asks of the sampler: one frozen value, checked when it is made. Free of torch."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Iterable

from attrs import field, frozen

from trivet import checked
from trivet.errors import RequestRejected

LOGPROBS_MAX = 4096
"""Most alternatives that are reported beside a token: scratch is reserved for that many in every row."""

STOP_CHARS_MAX = 2**14
"""Most characters of a request's stop strings together: each takes some hundred bytes while the request is open."""

_INTEGERS = (
    ("max_new_tokens", 1, checked.INT64_MAX),
    ("top_k", 0, checked.INT64_MAX),
    ("seed", -(2**63), 2**64 - 1),
    ("logprobs", 0, LOGPROBS_MAX),
)
"""Field, lowest and highest value."""

_NUMBERS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: value >= 0, "a finite number of at least 0"),
    ("top_p", lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    ("min_p", lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    ("repetition_penalty", lambda value: value > 0, "a finite number above 0"),
    ("presence_penalty", lambda value: True, "a finite number"),
    ("frequency_penalty", lambda value: True, "a finite number"),
)
"""Field, what a finite value must satisfy, and the same in words."""


def _refused(name: str, found: object, expected: str) -> RequestRejected:
    try:
        shown = reprlib.repr(found)
    except ValueError:  # an integer with more digits than Python prints
        shown = f"a {type(found).__name__} too long to print"
    return RequestRejected(f"sampling field {name!r}: found {shown}, expected {expected}")


def _integer(name: str, value: object, lowest: int, highest: int) -> int:
    expected = f"an integer from {lowest} to {highest}"
    if isinstance(value, bool):
        raise _refused(name, value, expected)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _refused(name, value, expected) from None
    if not lowest <= number <= highest:
        raise _refused(name, value, expected)
    return number


def _number(name: str, value: object, allowed: Callable[[float], bool], expected: str) -> float:
    if isinstance(value, bool | str | bytes):
        raise _refused(name, value, expected)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise _refused(name, value, expected) from None
    if not math.isfinite(number) or not allowed(number):
        raise _refused(name, value, expected)
    return number


def _stop_strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    expected = "a non-empty string or a sequence of them"
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else _listed("stop", value, expected)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise _refused("stop", value, expected)
    chars = sum(map(len, strings))  # type: ignore[arg-type]
    if chars > STOP_CHARS_MAX:
        raise RequestRejected(
            f"sampling field 'stop': found {len(strings)} strings of {chars} characters together, expected at most "
            f"{STOP_CHARS_MAX} characters"
        )
    return strings  # type: ignore[return-value]


def _token_ids(value: Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    expected = "a sequence of token ids"
    return tuple(
        _integer("stop_token_ids", token, 0, checked.INT64_MAX) for token in _listed("stop_token_ids", value, expected)
    )


def _listed(name: str, value: object, expected: str) -> tuple[object, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise _refused(name, value, expected)
    try:
        return tuple(value)
    except TypeError as error:  # an array without dimensions
        raise _refused(name, value, expected) from error


@frozen
class Sampling:
    """How a request's tokens are drawn, and when it ends.

    The order of operations on a row's logits: repetition penalty, presence and frequency penalties,
    temperature, top-k, top-p, min-p. Each filter works on what the one before it left, renormalised.

    Attributes:
        max_new_tokens: most new tokens; None means as many as the context and the pool of KV pages leave.
        temperature: divides the logits; 0 takes the most probable token (the lowest id among equals).
        top_k: keep the k most probable tokens, lowest ids first among equals; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probability reaches this; 1 keeps all.
        min_p: drop tokens less probable than this fraction of the most probable one; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens that stand in the prompt
            or the output (Keskar et al. 2019, arXiv:1909.05858, as Hugging Face's transformers applies it); 1
            changes nothing.
        presence_penalty: subtracted from the logit of every token that stands in the output (as in the OpenAI
            API).
        frequency_penalty: subtracted from a token's logit for each time it stands in the output (likewise).
        seed: from -2**63 to 2**64 - 1, modulo 2**64; equal seeds draw equal tokens from equal logits. None
            lets the runtime derive one.
        stop: texts that end the request; one string or several, none of them empty, of at most 16384 characters
            together.
        stop_token_ids: tokens that end the request, beside the model's end tokens.
        ignore_eos: go on past the model's end tokens.
        logprobs: how many alternatives to report beside each token's log-probability, at most 4096; None reports
            nothing.

    Raises:
        RequestRejected: a value cannot be served; names the field, what was found and what was expected.
    """

    max_new_tokens: int | None = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = field(default=(), converter=_stop_strings)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_token_ids)
    ignore_eos: bool = False
    logprobs: int | None = None

    def __attrs_post_init__(self) -> None:
        for name, lowest, highest in _INTEGERS:
            value = getattr(self, name)
            if value is not None or name == "top_k":
                object.__setattr__(self, name, _integer(name, value, lowest, highest))
        for name, allowed, expected in _NUMBERS:
            object.__setattr__(self, name, _number(name, getattr(self, name), allowed, expected))
        if not isinstance(self.ignore_eos, bool):
            raise _refused("ignore_eos", self.ignore_eos, "True or False")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, so that no random number is drawn."""
        return self.temperature == 0.0

    @property
    def needs_penalties(self) -> bool:
        """Whether tokens already seen change the logits, so that they have to be counted."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_ranking(self) -> bool:
        """Whether tokens have to be ordered by probability before one is drawn."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0)
