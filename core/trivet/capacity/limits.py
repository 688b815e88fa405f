"""What the operator allows."""

from __future__ import annotations

from attrs import frozen

from trivet.checked import INT32_MAX, ceil_div
from trivet.errors import CapacityExceeded, ConfigError

MOST_CONTEXT_TOKENS = 2**24
"""Rotary angles are products of float32 positions, and float32 counts exactly up to here."""


_OF_DEVICES = {
    "cpu": {"max_requests": 8, "max_step_tokens": 256, "max_context": 2048, "page_size": 16},
    "cuda": {"max_requests": 64, "max_step_tokens": 4096, "max_context": 32768, "page_size": 16},
}
"""What is taken where nothing is said, by kind of device."""

KINDS = tuple(_OF_DEVICES)
"""Of devices: `torch.device.type`."""


@frozen
class Limits:
    """How much may be asked of a runtime at once. Without arguments few: `for_device` gives those of a device.

    Attributes:
        max_requests: requests that may be active (decoding or prefilling) at once.
        max_step_tokens: tokens that one step may compute over all of its rows. May be below
            `max_requests`; rows then take turns.
        max_context: longest context of a request, prompt and new tokens together.
        page_size: tokens per page of the KV cache.

    Raises:
        ConfigError: a limit is not an integer of at least 1.
        CapacityExceeded: a limit does not fit the int32 that kernels take, or the context is longer than positions
            can be told apart.
    """

    max_requests: int = 8
    max_step_tokens: int = 256
    max_context: int = 1024
    page_size: int = 16

    def __attrs_post_init__(self) -> None:
        for name in ("max_requests", "max_step_tokens", "max_context", "page_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"limits: {name} is {value!r}, expected an integer of at least 1")
            if value > INT32_MAX:
                raise CapacityExceeded(name, value, INT32_MAX, "kernels take this count as int32: lower this limit")
        if self.max_context > MOST_CONTEXT_TOKENS:
            advice = "rotary positions are float32, which counts exactly up to there: lower this limit"
            raise CapacityExceeded("max_context", self.max_context, MOST_CONTEXT_TOKENS, advice)

    @classmethod
    def for_device(cls, kind: str, max_positions: int | None = None, **named: int) -> Limits:
        """What a runtime takes where it is given no limits, but for those named here.

        Args:
            kind: ``"cpu"`` or ``"cuda"``.
            max_positions: of the model, if it is known: the context is no longer, unless it is named.
            named: limits by name.

        Raises:
            ConfigError: there are no such devices, or as `Limits`.
            CapacityExceeded: as `Limits`.
        """
        if kind not in _OF_DEVICES:
            raise ConfigError(f"limits for devices of kind {kind!r}: expected one of {', '.join(_OF_DEVICES)}")
        limits = dict(_OF_DEVICES[kind])
        if max_positions is not None:
            limits["max_context"] = min(limits["max_context"], max_positions)
        return cls(**{**limits, **named})

    @property
    def step_tokens(self) -> int:
        """Tokens that one step can compute: no more than all contexts hold."""
        return min(self.max_step_tokens, self.max_requests * self.max_context)

    @property
    def step_rows(self) -> int:
        """Rows that one step can hold, each with a token."""
        return min(self.max_requests, self.step_tokens)

    @property
    def pages_per_request(self) -> int:
        """Pages that one request of the longest context spans."""
        return ceil_div(self.max_context, self.page_size)

    @property
    def logical_pages(self) -> int:
        """Entries that the page lists of one step can have in all.

        Not bounded by the physical pool: requests that share a prefix list the same page many times.
        """
        return self.max_requests * self.pages_per_request
