"""What captured steps are told before they are replayed: contexts, pages, tokens, slots and chunks, and padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.scheduler.fake_engine import World

from trivet.attention import StepBatch
from trivet.capacity import DeviceProfile, Limits
from trivet.config.rope import Rope
from trivet.errors import ConfigError
from trivet.geometry import AttentionGeometry
from trivet.ops.packed import PackedRows
from trivet.plugin.manager import PluginManager
from trivet.runtime.blueprint import Blueprint, draw_blueprint
from trivet.runtime.capture import CapturedPlans
from trivet.runtime.inputs import PROMPT_TABLE
from trivet.runtime.locate import locate_checkpoint
from trivet.runtime.options import SizingOptions
from trivet.runtime.short_prompts import PromptBucket, ShortPrompts, most_read_tokens
from trivet.scheduler.plan import StepPlan

ATTENTION = AttentionGeometry(2, 1, 4, Rope(theta=1e4, rotary_dim=4))
PAGE_SIZE, PADDING_PAGE, PADDING_SLOT = 4, 999, 77


class Owner:
    """Keeps what it was updated to."""

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []

    def update(self, batch: StepBatch) -> None:
        self.batches.append(batch)

    def note_capture(self) -> None:
        pass


class Inputs:
    """Keeps what it was filled with."""

    def __init__(self) -> None:
        self.filled: dict[str, np.ndarray] = {}

    def fill(self, name: str, values: np.ndarray) -> torch.Tensor:
        self.filled[name] = values.copy()
        return torch.from_numpy(self.filled[name])


def prompts_of(owner: Owner, inputs: Inputs, most_read_tokens: int | None = None) -> ShortPrompts:
    prompts = ShortPrompts(
        CapturedPlans({ATTENTION: owner}, PADDING_PAGE),  # type: ignore[dict-item]
        inputs,  # type: ignore[arg-type]
        page_size=PAGE_SIZE,
        padding_slot=PADDING_SLOT,
        forward=lambda token_ids, slots, rows: token_ids,
        recurrent=True,
        most_read_tokens=most_read_tokens,
    )
    for tokens in (16, 64):
        graph: Any = SimpleNamespace(replay=lambda: None)
        prompts._buckets[tokens] = PromptBucket(tokens, graph, torch.zeros(tokens, 1))
    prompts._sizes = (16, 64)
    return prompts


def blueprint_of(name: str, policy: str) -> Blueprint:
    """The sizes of a shipped geometry on an H200."""
    options = SizingOptions(numeric_policy=policy)
    return draw_blueprint(locate_checkpoint(name), options, DeviceProfile.named("h200"), PluginManager.discover())


def planned(prompt: int, *, cached: int = 0, kind: str = "generate", others: int = 0, cuts: bool = False) -> StepPlan:
    """The first step of a prompt of so many tokens, of which an earlier one left `cached`."""
    limits = Limits(8, 512, 512, PAGE_SIZE)
    world = World.of(limits, 500, snapshots=8 if cuts else None, cuts_inside=cuts)
    ids = [(7 * place) % 97 for place in range(prompt)]
    if cached:
        world.serve([*ids[:cached], 96], 1)
    world.submit(ids, 3, kind)
    for other in range(others):
        world.submit([other, 5], 3)
    plan = world.scheduler.schedule()
    assert plan is not None
    return plan


@pytest.mark.parametrize(("prompt", "cached"), [(1, 0), (16, 0), (17, 0), (64, 0), (41, 40), (60, 20)])
def test_every_token_of_a_short_prompt_attends_to_those_up_to_itself(prompt: int, cached: int) -> None:
    owner, inputs = Owner(), Inputs()
    prompts, plan = prompts_of(owner, inputs), planned(prompt, cached=cached)
    tokens = prompt - cached
    bucket = prompts.bucket_of(plan)
    assert bucket is not None and bucket.tokens == (16 if tokens <= 16 else 64)
    hidden, slots = prompts.replay(bucket, plan)
    assert hidden is bucket.hidden and slots.tolist() == plan.slots.tolist()
    (batch,) = owner.batches
    assert batch.decode_rows == batch.rows == bucket.tokens and (batch.query_lengths == 1).all()
    pages = plan.requests[0].pages
    for row in range(bucket.tokens):
        own = batch.page_indices[batch.page_indptr[row] : batch.page_indptr[row + 1]].tolist()
        context = cached + row + 1 if row < tokens else 1
        assert batch.kv_lengths[row] == context
        assert own == (list(pages[: -(-context // PAGE_SIZE)]) if row < tokens else [PADDING_PAGE])
    ids = inputs.filled["token_ids"]
    assert ids.tolist() == [*plan.token_ids(), *[0] * (bucket.tokens - tokens)]
    values, shape = PackedRows((tokens,)).table_values(0)
    assert inputs.filled[PROMPT_TABLE].tolist() == values.tolist()
    assert shape.table(torch.from_numpy(values)).starts.tolist() == [0, tokens]


@pytest.mark.parametrize(
    ("prompt", "kind", "others", "cuts"),
    [(65, "generate", 0, False), (9, "score", 0, False), (9, "generate", 1, False), (40, "generate", 0, True)],
    ids=["too long", "scored", "beside another", "cut"],
)
def test_other_steps_are_not_replayed_as_a_short_prompt(prompt: int, kind: str, others: int, cuts: bool) -> None:
    plan = planned(prompt, kind=kind, others=others, cuts=cuts)
    assert prompts_of(Owner(), Inputs()).bucket_of(plan) is None


@pytest.mark.parametrize(("prompt", "cached"), [(40, 0), (44, 40)])
def test_where_tokens_read_more_context_than_launches_cost_a_prompt_is_not_replayed(prompt: int, cached: int) -> None:
    plan = planned(prompt, cached=cached)
    read = (prompt - cached) * prompt
    assert prompts_of(Owner(), Inputs(), read).bucket_of(plan) is not None
    assert prompts_of(Owner(), Inputs(), read - 1).bucket_of(plan) is None


def test_the_shipped_geometries_replay_a_short_rest_behind_a_prefix_of_4096_tokens() -> None:
    for name in ("qwen3-14b", "qwen3.5-27b"):
        tuned, pinned = (blueprint_of(name, policy) for policy in ("tuned", "pinned"))
        bound = most_read_tokens(tuned)
        assert bound is not None and 16 * (4096 + 16) <= bound < 64 * 32768
        assert most_read_tokens(pinned) is None


def test_a_decode_step_is_not_replayed_as_a_short_prompt() -> None:
    world = World.of(Limits(8, 512, 512, PAGE_SIZE), 500)
    world.submit([1, 2, 3], 5)
    world.step()
    plan = world.scheduler.schedule()
    assert plan is not None and plan.path == "decode"
    assert prompts_of(Owner(), Inputs()).bucket_of(plan) is None


def test_an_owner_that_cannot_be_captured_is_named() -> None:
    with pytest.raises(ConfigError, match=f"{ATTENTION.label} has no note_capture"):
        CapturedPlans({ATTENTION: object()}, PADDING_PAGE)  # type: ignore[dict-item]
