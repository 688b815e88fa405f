"""The group-6 decode path: one owner, one capacity, stable pointers over every shape, and an error one past each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from tests.qwen35.conftest import Group6
from tests.support.positions import EveryPosition, drawn, serve

import trivet
from trivet.attention import StepBatch
from trivet.attention.reference.path import ReferencePath
from trivet.capacity import PlanCapacity, RuntimeCapacity
from trivet.layout import Buffers
from trivet.runtime import load as load_module

ATOL = 2e-3
LIMITS = trivet.Limits(max_requests=4, max_step_tokens=24, max_context=90, page_size=4)


@pytest.fixture
def runtime(group6: Group6) -> Iterator[trivet.Runtime]:
    with trivet.Runtime.load(group6.directory, device="cpu", limits=LIMITS, autostart=False) as runtime:
        yield runtime


def pointers(runtime: trivet.Runtime) -> dict[str, dict[str, int]]:
    """Addresses of every owned buffer: weights, plan, rotary table, inputs, sampler, states, snapshots, pages."""
    owned = {line: buffers.pointers() for line, buffers in runtime._engine.owned.items()}
    assert {"plan 12/2x16", "recurrent state", "snapshots", "step inputs", "KV pages"} <= set(owned)
    return owned


def test_consecutive_decode_steps_change_batch_context_and_pages_over_one_owner(
    runtime: trivet.Runtime, group6: Group6
) -> None:
    rng = np.random.default_rng(1)
    engine = runtime._engine
    (attention,) = engine.owners
    assert attention.group_size == 6
    owner, before = engine.owners[attention], pointers(runtime)
    allocations = runtime.stats()["device_allocations"]
    ears = EveryPosition(runtime)
    prompts = [drawn(rng, int(n)) for n in (3, 40, 4, 17, 1, 60, 8)]
    news = [30, 5, 22, 3, 40, 12, 1]
    requests = [
        runtime.submit(prompt, trivet.Sampling(max_new_tokens=new)) for prompt, new in zip(prompts, news, strict=True)
    ]
    shapes = set()
    while not all(request.done for request in requests):
        report = runtime.step()
        if report.path == "decode":
            rows = engine.scheduler.running
            shapes.add((report.rows, max((row.computed_tokens for row in rows), default=0),
                        sum(len(row.pages) for row in rows)))  # fmt: skip
        assert engine.owners[attention] is owner
        assert pointers(runtime) == before
    assert len({batch for batch, _, _ in shapes}) > 1
    assert len({context for _, context, _ in shapes}) > 10
    assert len({pages for _, _, pages in shapes}) > 3
    assert runtime.stats()["device_allocations"] == allocations
    for prompt, request in zip(prompts, requests, strict=True):
        assert ears.worst_gap(group6.model, prompt, request) <= ATOL


def batch_with(capacity: PlanCapacity, **changes: Any) -> StepBatch:
    """The fullest pure decode step, every context as long as it may be, with `changes`."""
    rows, pages = capacity.requests, capacity.pages_per_request
    batch = StepBatch(
        query_lengths=[1] * rows,
        kv_lengths=[capacity.positions] * rows,
        page_indptr=np.arange(rows + 1) * pages,
        page_indices=np.arange(rows * pages) % 3,
        decode_rows=rows,
        query_heads=capacity.query_heads,
        kv_heads=capacity.kv_heads,
    )
    return attrs.evolve(batch, **changes)


ONE_PAST: dict[str, Any] = {
    "requests": lambda c: {"query_lengths": [1] * (c.requests + 1), "kv_lengths": [1] * (c.requests + 1)},
    "indptr": lambda c: {"page_indptr": [0] * (c.indptr + 1)},
    "tokens": lambda c: {"query_lengths": [c.tokens - c.requests + 2] + [1] * (c.requests - 1)},
    "positions": lambda c: {"kv_lengths": [c.positions + 1] * c.requests},
    "pages_per_request": lambda c: {"page_indptr": [0] + [c.pages_per_request + 1] * c.requests},
    "pages": lambda c: {"page_indices": [0] * (c.pages + 1)},
    "query_heads": lambda c: {"query_heads": c.query_heads + 1},
    "kv_heads": lambda c: {"kv_heads": c.kv_heads + 1},
}  # fmt: skip


@pytest.mark.parametrize("dimension", ONE_PAST)
def test_one_past_a_dimension_raises_with_its_name_and_the_runtime_goes_on(
    dimension: str, runtime: trivet.Runtime, group6: Group6
) -> None:
    (owner,) = runtime._engine.owners.values()
    capacity = owner.capacity
    owner.update(batch_with(capacity))  # the bound itself fits
    with pytest.raises(trivet.CapacityExceeded) as raised:
        owner.update(batch_with(capacity, **ONE_PAST[dimension](capacity)))
    assert (raised.value.dimension, raised.value.requested) == (dimension, raised.value.bound + 1)
    assert raised.value.bound == getattr(capacity, dimension)
    ears = EveryPosition(runtime)
    prompt = drawn(np.random.default_rng(2), 30)
    (request,) = serve(runtime, [prompt], trivet.Sampling(max_new_tokens=3))
    assert ears.worst_gap(group6.model, prompt, request) <= ATOL


def test_profile_reserve_owner_and_admission_hold_the_same_capacity_object(
    group6: Group6, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled: list[RuntimeCapacity] = []
    bound: list[tuple[PlanCapacity, Buffers]] = []
    laid_out: list[PlanCapacity] = []
    run_profile, bind, layout = load_module.run_profile, ReferencePath.bind, ReferencePath.layout

    def spy_profile(capacity: RuntimeCapacity, *rest: Any) -> Any:
        profiled.append(capacity)
        return run_profile(capacity, *rest)

    def spy_bind(self: ReferencePath, capacity: PlanCapacity, buffers: Buffers) -> Any:
        bound.append((capacity, buffers))
        return bind(self, capacity, buffers)

    def spy_layout(self: ReferencePath, capacity: PlanCapacity) -> Any:
        laid_out.append(capacity)
        return layout(self, capacity)

    monkeypatch.setattr(load_module, "run_profile", spy_profile)
    monkeypatch.setattr(ReferencePath, "bind", spy_bind)
    monkeypatch.setattr(ReferencePath, "layout", spy_layout)
    with trivet.Runtime.load(group6.directory, device="cpu", limits=LIMITS, autostart=False) as runtime:
        engine = runtime._engine
        blueprint = engine.blueprint
        (plan,) = blueprint.capacity.plans
        assert profiled == [blueprint.capacity] and profiled[0] is blueprint.capacity
        assert len(bound) == 2, "one owner for the profile, one for serving"
        assert all(capacity is plan for capacity, _ in bound)
        assert laid_out and all(capacity is plan for capacity in laid_out)
        (owner,) = engine.owners.values()
        assert owner.capacity is plan
        assert owner.buffers is bound[1][1] is engine.owned["plan 12/2x16"]
        assert bound[0][1].layout == bound[1][1].layout, "the profile's plan is as large as the serving plan"
        assert engine.scheduler.limits is plan.limits is blueprint.capacity.limits is LIMITS
        assert engine.scheduler.gate.limits is LIMITS


def test_page_lists_longer_than_the_pool_are_served_over_a_shared_prefix(group6: Group6) -> None:
    """Logical pages, not physical ones, bound the plan: four requests list the same sixteen pages each."""
    rng = np.random.default_rng(3)
    shared = drawn(rng, 64)
    prompts = [[*shared, *drawn(rng, 3)] for _ in range(4)]
    pages = 16 + 4 * 4
    with trivet.Runtime.load(group6.directory, device="cpu", limits=LIMITS, kv_pages=pages, autostart=False) as runtime:
        for _ in range(2):
            runtime.generate([[*shared, 1]], trivet.Sampling(max_new_tokens=1))
        ears = EveryPosition(runtime)
        requests = [runtime.submit(prompt, trivet.Sampling(max_new_tokens=8)) for prompt in prompts]
        most = 0
        while not all(request.done for request in requests):
            runtime.step()
            most = max(most, sum(len(row.pages) for row in runtime._engine.scheduler.running))
        assert most > pages, "the test shows nothing unless the lists outgrow the pool"
        for prompt, request in zip(prompts, requests, strict=True):
            assert request.completion.cached_tokens == 64
            assert ears.worst_gap(group6.model, prompt, request) <= ATOL


PUBLISHED_27B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    },
}


def test_the_full_27b_geometry_reserves_what_transformers_counts_and_its_states(tmp_path: Path) -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_27B))
    limits = trivet.Limits(max_requests=32, max_step_tokens=2048, max_context=32768, page_size=16)
    ledger = trivet.plan_memory(tmp_path, "h200", limits=limits, attention="reference")
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**PUBLISHED_27B["text_config"]))
    float32 = ("A_log", "dt_bias")
    parameters = sum(
        tensor.numel() * (4 if name.endswith(float32) else 2) for name, tensor in model.state_dict().items()
    )
    assert ledger.line("weights").bytes == parameters
    channels, taps = 2 * 16 * 128 + 48 * 128, 3
    state = 48 * (48 * 128 * 128 * 4 + channels * taps * 2)
    assert ledger.line("recurrent state").bytes == (32 + 1) * state
    assert ledger.line("snapshots").bytes % state == 0
    page = 16 * 2 * 16 * 4 * 256 * 2  # full layers, keys and values, tokens, heads, elements, bytes
    assert ledger.line("KV pages").bytes == (ledger.kv_pages + 1) * page
    assert ledger.total_bytes <= ledger.budget_bytes
    assert "plan 24/4x256" in [line.name for line in ledger.items]
