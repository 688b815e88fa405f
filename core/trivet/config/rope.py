"""Rotary position embedding: the dialects of config.json read into one value, and its frequencies.

Dialects, all of which read alike: ``rope_parameters`` (one object that holds everything), or ``rope_theta``
beside ``rope_scaling`` (whose kind is called ``rope_type`` or, in older files, ``type``).
``partial_rotary_factor`` stands inside that object or beside it.

Sources: RoPE (arXiv 2104.09864), linear interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071), and the
``llama3`` rule that Llama 3.1 was published with. Config keys and their defaults are those of transformers.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trivet.config.document import ConfigDocument
from trivet.errors import ConfigError

Kind: TypeAlias = Literal["default", "linear", "llama3", "yarn"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SECTIONS = ("rope_parameters", "rope_scaling")
THETA_MAXIMUM = 1e30
"""Powers of theta up to the first are taken in float32, whose largest value is 3.4e38."""


@frozen
class Rope:
    """How positions turn into rotations of the first `rotary_dim` entries of each query and key head.

    Attributes:
        theta: base of the geometric series of wavelengths.
        rotary_dim: entries of a head that are rotated; even, at most the head dimension.
        kind: how the series is stretched beyond the context it was trained on.
        factor: stretch, 1 or more (linear, llama3, yarn).
        low_freq_factor: llama3: wavelengths above ``original_context / low_freq_factor`` are stretched whole.
        high_freq_factor: llama3: those below ``original_context / high_freq_factor`` are left alone.
        original_context: tokens of the context before stretching (llama3, yarn).
        beta_fast: yarn: dimensions that turn more often than this over the original context are left alone.
        beta_slow: yarn: those that turn less often than this are stretched whole.
        truncate: yarn: whether those two bounds are rounded outwards to whole dimensions.
        attention_factor: yarn: what cosines and sines are multiplied with, where the config states it.
        mscale: yarn: weight of ``log(factor)`` in the numerator of the attention factor; 0 when not stated.
        mscale_all_dim: yarn: the same in its denominator.

    Raises:
        ConfigError: a value outside what the kind allows.
    """

    theta: float
    rotary_dim: int
    kind: Kind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __attrs_post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"rope kind {self.kind!r} is not served: expected one of {', '.join(KINDS)}")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ConfigError(f"rotary dimension {self.rotary_dim}: expected an even number of at least 2")
        if not 1.0 < self.theta <= THETA_MAXIMUM:
            raise ConfigError(f"rope theta {self.theta}: expected a number above 1, at most {THETA_MAXIMUM:g}")
        if not (math.isfinite(self.factor) and self.factor >= 1.0):
            raise ConfigError(f"rope factor {self.factor}: expected a finite number of at least 1")
        if self.kind in ("llama3", "yarn") and self.original_context < 1:
            raise ConfigError(f"rope kind {self.kind!r} needs the original context, found {self.original_context}")
        if self.kind == "llama3" and not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope low_freq_factor {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}: "
                "expected 0 < low < high"
            )
        if self.kind == "yarn" and not 0.0 < self.beta_slow <= self.beta_fast:
            raise ConfigError(
                f"rope beta_slow {self.beta_slow} and beta_fast {self.beta_fast}: expected 0 < slow <= fast"
            )

    @classmethod
    def read(
        cls,
        document: ConfigDocument,
        head_dim: int,
        default_theta: float = 10_000.0,
        default_rotary_factor: float = 1.0,
    ) -> Rope:
        """Read whichever dialect `document` speaks.

        `default_theta` and `default_rotary_factor` hold where the config states none; they are the
        architecture's (Qwen3.5 rotates a quarter of the head).

        Raises:
            ConfigError: an unknown kind, a missing or impossible parameter, a rotary dimension that is odd,
                or two dialects in one config that disagree.
        """
        sections = [document.sub(key) for key in SECTIONS if document.has(key)]
        # An empty object states nothing; with none left, rope_theta beside it still counts.
        sections = [section for section in sections if section.values] or [ConfigDocument({}, document.where)]
        ropes = [
            _read_section(section, document, head_dim, default_theta, default_rotary_factor) for section in sections
        ]
        if any(rope != ropes[0] for rope in ropes):
            raise ConfigError(
                f"{document.where}: {' and '.join(map(repr, SECTIONS))} disagree: {ropes[0]} and {ropes[1]}: "
                "expected one of them, or both alike; remove the one that is out of date"
            )
        return ropes[0]

    @property
    def attention_scaling(self) -> float:
        """What cosines and sines are multiplied with: 1 except for yarn (section 3.4 of its paper)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._log_scale(self.mscale) / self._log_scale(self.mscale_all_dim)
        return self._log_scale(1.0)

    def _log_scale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    def inverse_frequencies(self) -> npt.NDArray[np.float32]:
        """Radians per position of each rotated pair: float32, shape ``(rotary_dim / 2,)``.

        The operations and their order in float32 are transformers', so that the angles of long contexts
        agree; powers are taken in float64 and rounded once, which no libm can disagree with.
        """
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        theta = np.float64(np.float32(self.theta))
        powers: npt.NDArray[np.float32] = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
        frequencies = np.float32(1.0) / powers
        if self.kind == "linear":
            return frequencies / np.float32(self.factor)
        if self.kind == "llama3":
            return self._llama3(frequencies)
        if self.kind == "yarn":
            return self._yarn(powers)
        return frequencies

    def _llama3(self, frequencies: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        one, factor = np.float32(1.0), np.float32(self.factor)
        wavelengths = (one / frequencies) * np.float32(2 * math.pi)
        longest_kept = np.float32(self.original_context / self.high_freq_factor)
        shortest_stretched = np.float32(self.original_context / self.low_freq_factor)
        turns = (one / wavelengths) * np.float32(self.original_context)
        blend = (turns - np.float32(self.low_freq_factor)) / np.float32(self.high_freq_factor - self.low_freq_factor)
        blended = (one - blend) * frequencies / factor + blend * frequencies
        return np.where(
            wavelengths > shortest_stretched,
            frequencies / factor,
            np.where(wavelengths < longest_kept, frequencies, blended),
        )

    def _yarn(self, powers: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        one = np.float32(1.0)
        low, high = self._dimension_turning(self.beta_fast), self._dimension_turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        if low == high:
            high += 0.001  # a step instead of a ramp of no width
        ramp = (np.arange(self.rotary_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
        kept = one - np.clip(ramp, np.float32(0.0), one)
        stretched = one / (np.float32(self.factor) * powers)
        frequencies: npt.NDArray[np.float32] = stretched * (one - kept) + (one / powers) * kept
        return frequencies

    def _dimension_turning(self, turns: float) -> float:
        """The (fractional) pair that makes this many turns over the original context."""
        turned = self.original_context / (turns * 2 * math.pi)
        return self.rotary_dim * math.log(turned) / (2 * math.log(self.theta))


def _read_section(
    section: ConfigDocument,
    document: ConfigDocument,
    head_dim: int,
    default_theta: float,
    default_rotary_factor: float,
) -> Rope:
    for key, value in section.values.items():
        if isinstance(value, dict):
            section.refuse(key, "one rope serves all layers, not one per kind of layer")
    kind = _kind(section)
    if section.has("mrope_section"):
        section.integers("mrope_section")  # of no effect for text: its positions coincide on all axes
    section.boolean("mrope_interleaved", default=False)
    theta = _stated(section, document, "rope_theta").number(
        "rope_theta", default=default_theta, above=1.0, maximum=THETA_MAXIMUM
    )
    rotary_dim = _rotary_dim(section, document, head_dim, default_rotary_factor)
    if kind == "default":
        return Rope(theta, rotary_dim)
    factor = section.number("factor", minimum=1.0)
    if kind == "linear":
        return Rope(theta, rotary_dim, "linear", factor)
    original_context = _original_context(section, document)
    if kind == "llama3":
        low_freq_factor = section.number("low_freq_factor", above=0.0)
        return Rope(
            theta,
            rotary_dim,
            "llama3",
            factor,
            low_freq_factor=low_freq_factor,
            high_freq_factor=section.number("high_freq_factor", above=low_freq_factor),
            original_context=original_context,
        )
    beta_slow = section.number("beta_slow", default=1.0, above=0.0)
    return Rope(
        theta,
        rotary_dim,
        "yarn",
        factor,
        original_context=original_context,
        beta_fast=section.number("beta_fast", default=32.0, minimum=beta_slow),
        beta_slow=beta_slow,
        truncate=section.boolean("truncate", default=True),
        attention_factor=section.number("attention_factor", default=None, above=0.0),
        mscale=section.number("mscale", default=0.0, minimum=0.0),
        mscale_all_dim=section.number("mscale_all_dim", default=0.0, minimum=0.0),
    )


def _kind(section: ConfigDocument) -> Kind:
    stated = {key: section.string(key) for key in ("rope_type", "type") if section.has(key)}
    # Multimodal files call the default series "mrope": its axes coincide for text.
    kinds = {"default" if name == "mrope" else name for name in stated.values()}
    if len(kinds) > 1:
        raise section.error("rope_type", f"the kind that 'type' states, {stated['type']!r}", "remove one of them")
    if not kinds:
        if section.has("factor"):
            raise ConfigError(
                f"{section.where}: 'rope_type' is missing beside 'factor': expected one of {', '.join(KINDS)}"
            )
        return "default"
    found = kinds.pop()
    for kind in KINDS:
        if kind == found:
            return kind
    raise section.error(
        "rope_type" if "rope_type" in stated else "type",
        f"one of {', '.join(KINDS)}",
        "this rope is not served; use a checkpoint with one of those",
    )


def _stated(section: ConfigDocument, document: ConfigDocument, key: str) -> ConfigDocument:
    return section if section.has(key) else document


def _rotary_dim(section: ConfigDocument, document: ConfigDocument, head_dim: int, default: float) -> int:
    source = _stated(section, document, "partial_rotary_factor")
    factor = source.number("partial_rotary_factor", default=default, above=0.0, maximum=1.0)
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(
            f"{source.where}: 'partial_rotary_factor' {factor:g} of head dimension {head_dim} rotates "
            f"{rotary_dim} entries: expected an even number of at least 2"
        )
    return rotary_dim


def _original_context(section: ConfigDocument, document: ConfigDocument) -> int:
    key = "original_max_position_embeddings"
    for source in (document, section):
        if source.has(key):
            return source.integer(key)
    return document.integer("max_position_embeddings")
