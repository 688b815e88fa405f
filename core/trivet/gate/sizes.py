"""How large the runtime of the gate is made, and which limits are refused before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from trivet.capacity import Limits
from trivet.errors import ConfigError
from trivet.gate.settings import (
    BATCHED_PROMPTS,
    CONTROL_NEW_TOKENS,
    CONTROL_PROMPTS,
    DECODES_BEFORE_DROP,
    FLOOR_PASS,
    LEAST_NEW_TOKENS,
    LONG_CONTROL_PROMPTS,
    LONG_PROMPTS,
    MIXED_DECODES,
    MIXED_NEW_TOKENS,
    SEQUENTIAL_PROMPTS,
    WARM_DECODES,
    WARM_MORE_TOKENS,
    WARM_TAILS,
    GateSettings,
    together_tokens,
)
from trivet.geometry import ModelGeometry

STEP_TOKENS = {"cpu": 64, "cuda": 1024}
"""Tokens that one step may compute, by kind of device, without long prompts."""
LONG_STEP_TOKENS = 4096
PAGE_SIZE = 16
CONTROLS_DEMAND, LONG_CONTROLS_DEMAND = "controls", "long controls"
"""Names under which the controls make their demands; the others are those of passes."""


@frozen
class Demand:
    """What a pass, or the controls, take of the runtime at most.

    Attributes:
        rows: requests that are served side by side.
        prompts: tokens of each prompt whose pages are held at once, by a request or for a later one.
        new_tokens: of each of them.
    """

    rows: int
    prompts: tuple[int, ...]
    new_tokens: int

    @property
    def context_tokens(self) -> int:
        """The longest context."""
        return max(self.prompts) + self.new_tokens

    def pages(self, page_size: int) -> int:
        """Pages that are held at once."""
        return sum(-(-(tokens + self.new_tokens) // page_size) for tokens in self.prompts)


def demands(settings: GateSettings, step_tokens: int, mixed_prompt_tokens: int, grain_tokens: int) -> dict[str, Demand]:
    """The demands of every pass that there is with these settings, and of the controls, by name.

    Args:
        step_tokens: that one step may compute.
        mixed_prompt_tokens: of the prompt that is computed in chunks beside requests that decode.
        grain_tokens: of the prefix cache; 0 without one.
    """

    def together(*prompts: int, least: int = settings.new_tokens, more: int = 0) -> Demand:
        return Demand(len(prompts), prompts, together_tokens(least, prompts, step_tokens) + more)

    most = BATCHED_PROMPTS[1]
    found = {FLOOR_PASS: Demand(1, (max(SEQUENTIAL_PROMPTS),), settings.new_tokens)}
    found |= {f"batched-{rows}": together(*[most] * rows) for rows in settings.batches}
    rows = settings.batches[0]
    dropped = together(*[most] * rows, more=DECODES_BEFORE_DROP)
    found["dropped"] = Demand(rows, (*dropped.prompts, most), dropped.new_tokens)
    alike = [2 * grain_tokens + tail for tail in WARM_TAILS]
    found["warm"] = Demand(1 + len(WARM_DECODES), (*alike, *WARM_DECODES), settings.new_tokens + WARM_MORE_TOKENS)
    beside = [most] * MIXED_DECODES
    new_tokens = max(together(*beside).new_tokens, MIXED_NEW_TOKENS)
    found["mixed"] = Demand(1 + MIXED_DECODES, (mixed_prompt_tokens, *beside), new_tokens)
    found[CONTROLS_DEMAND] = together(*CONTROL_PROMPTS, least=CONTROL_NEW_TOKENS)
    if settings.long:
        found["long-sequential"] = Demand(1, (max(LONG_PROMPTS),), settings.new_tokens)
        found["long-batched"] = together(*LONG_PROMPTS, *beside)
        found[LONG_CONTROLS_DEMAND] = together(*LONG_CONTROL_PROMPTS, least=LEAST_NEW_TOKENS)
    return found


@frozen
class Sizes:
    """What the passes need of the runtime.

    Attributes:
        limits: of the runtime.
        kv_pages: pages that hold the largest pass.
        mixed_prompt_tokens: a prompt that takes three steps beside decodes.
    """

    limits: Limits
    kv_pages: int
    mixed_prompt_tokens: int

    @classmethod
    def of(cls, settings: GateSettings, geometry: ModelGeometry, device: str, grain_tokens: int) -> Sizes:
        """The sizes for a model on a kind of device, ``"cpu"`` or ``"cuda"``.

        Limits that were not given leave room for all passes that can be had with the others, whichever are run: what a
        pass finds does not depend on which others run with it.

        Args:
            grain_tokens: of the prefix cache.

        Raises:
            ConfigError: the model has too few positions for what is run, or the limits leave no room for it.
        """
        asked = dict(settings.load.get("limits", {}))
        page_size = asked.get("page_size", PAGE_SIZE)
        step_tokens = LONG_STEP_TOKENS if settings.long else min(STEP_TOKENS[device], geometry.max_positions // 4)
        step_tokens = asked.get("max_step_tokens", step_tokens)
        mixed = 2 * step_tokens + step_tokens // 4 + 1
        grain_tokens = grain_tokens if settings.load.get("prefix_cache", True) else 0
        every = demands(settings, step_tokens, mixed, grain_tokens)
        run = {name: demand for name, demand in every.items() if _is_run(name, settings)}

        rows = max(demand.rows for demand in run.values())
        most_rows = asked.get("max_requests", max(demand.rows for demand in every.values()))
        for limit, found in (("max_step_tokens", step_tokens), ("max_requests", most_rows)):
            if found < rows:
                raise ConfigError(
                    f"the gate serves up to {rows} requests side by side, and {limit} is {found}: raise it"
                    f"{', or lower --batch' if rows in settings.batches else ''}"
                )
        context_tokens = asked.get("max_context", geometry.max_positions)
        longest = max(run, key=lambda name: run[name].context_tokens)
        if run[longest].context_tokens > context_tokens:
            needs = _context_text(longest, run[longest], step_tokens, grain_tokens)
            fewer = "--max-context gives" if "max_context" in asked else "the model has positions for"
            advice = _context_advice(longest, run[longest], settings, geometry)
            raise ConfigError(f"the gate needs {needs}, and {fewer} {context_tokens}: {', or '.join(advice)}")
        pages = max(demand.pages(page_size) for demand in run.values())
        most_pages = settings.load.get("kv_pages", max(demand.pages(page_size) for demand in every.values()))
        if most_pages < pages:
            raise ConfigError(
                f"the gate serves requests that hold up to {pages} pages of {page_size} tokens at once, and kv_pages "
                f"is {most_pages}: raise it, or leave it out"
            )

        held = [
            demand
            for demand in every.values()
            if demand.rows <= min(step_tokens, most_rows)
            and demand.context_tokens <= context_tokens
            and demand.pages(page_size) <= most_pages
        ]
        longest_tokens = max(demand.context_tokens for demand in held)
        limits = {
            "max_requests": 1 << (max(demand.rows for demand in held) - 1).bit_length(),
            "max_step_tokens": step_tokens,
            "max_context": -(-longest_tokens // page_size) * page_size,
            "page_size": page_size,
            **asked,
        }
        kv_pages = max(demand.pages(page_size) for demand in held)
        return cls(Limits(**limits), kv_pages + kv_pages // 4 + 8, mixed)


def _is_run(name: str, settings: GateSettings) -> bool:
    """Whether what makes a demand is served in this run."""
    if name in (CONTROLS_DEMAND, LONG_CONTROLS_DEMAND):
        return settings.controls
    return not settings.passes or name in settings.passes or (settings.floor and name == FLOOR_PASS)


def _context_text(name: str, demand: Demand, step_tokens: int, grain_tokens: int) -> str:
    """The context that the longest request needs, and why it is so long."""
    prompt = max(demand.prompts)
    if name == "mixed":
        why = f"a prompt of {prompt} is computed in steps of at most {step_tokens}"
    elif name == "warm":
        why = f"a prompt of {prompt} has two grains of the prefix cache in it, of {grain_tokens} tokens each"
    elif demand.new_tokens > prompt:
        why = f"{demand.rows} requests decode side by side after prompts in steps of at most {step_tokens}"
    else:
        why = f"a prompt of {prompt} in {name}"
    return f"a context of {demand.context_tokens} tokens ({why})"


def _context_advice(name: str, demand: Demand, settings: GateSettings, geometry: ModelGeometry) -> Sequence[str]:
    """What may be done about the longest request."""
    limits: Mapping[str, int] = settings.load.get("limits", {})
    advice = ["raise it"] if "max_context" in limits else []
    if name == "mixed":
        advice.append("lower --max-step-tokens")
    elif name == "warm":
        advice.append("lower --snapshot-stride" if geometry.hybrid else "lower --page-size")
    elif demand.new_tokens > max(demand.prompts):
        advice.append("raise --max-step-tokens")
    if settings.long:
        advice.append("leave out --long")
    if name in (CONTROLS_DEMAND, LONG_CONTROLS_DEMAND):
        advice.append("give --no-controls")
    elif settings.passes and name not in settings.passes:
        advice.append("give --no-floor")
    else:
        advice.append("run other passes (--pass)")
    return advice
