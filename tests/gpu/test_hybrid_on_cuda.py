"""Tiny Qwen3.5 models on a CUDA device: decode graphs, snapshots inside a prompt's one step, and the pinned policy."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.test_pinned import DRAWN, REPORTED, said
from tests.gpu.test_qwen3_on_cuda import VOCABULARY, prompts, regrets
from tests.support.alone import assert_served_as_alone, drawn_traffic
from tests.support.checkpoints import make_qwen35
from tests.support.poison import NAN, poison

import trivet
from trivet.caches.state import PADDING_SLOTS
from trivet.reservation.cuda import GRAPHS_LINE

SHAPES = [(4, 1), (6, 2), (6, 3)]
"""Query heads of the one KV head, and value heads per key head."""

LIMITS = trivet.Limits(max_requests=8, max_step_tokens=512, max_context=1024, page_size=16)
CHUNKED = trivet.Limits(max_requests=8, max_step_tokens=72, max_context=1024, page_size=16)
STRIDE = 64
GREEDY = trivet.Sampling(max_new_tokens=24, temperature=0.0, ignore_eos=True)
REGRET_NATS = 0.5
"""The most that a token may be less likely than the best one of another run in bfloat16, in which each of the two may
be 0.25 nats apart (see ``test_short_prompts``)."""


def make(directory: Path, group: int, expansion: int) -> Path:
    """Two recurrent layers around one of full attention, heads of 64 and of 256."""
    make_qwen35(
        directory,
        seed=group + expansion,
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=group,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=2,
        linear_num_value_heads=2 * expansion,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    return directory


def load(directory: Path, **settings: Any) -> trivet.Runtime:
    options: dict[str, Any] = {"kv_pages": 512, "limits": LIMITS, "autostart": False, "snapshot_stride": STRIDE}
    return trivet.Runtime.load(
        directory, device="cuda", dtype="bfloat16", attention="flashinfer", **(options | settings)
    )


def drawn_prompt(tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (tokens,), generator=generator).tolist()


@pytest.mark.parametrize(("group", "expansion"), SHAPES)
def test_captured_decode_steps_give_the_tokens_of_eager_ones(group: int, expansion: int, tmp_path: Path) -> None:
    """Rows that fill a bucket take the same kernels either way, so that their tokens are the same."""
    directory = make(tmp_path, group, expansion)
    asked = [drawn_prompt(tokens, tokens) for tokens in (1, 17, 70, 3, 9, 160, 33, 5)]
    tokens, graph_steps = {}, {}
    for captured in (True, False):
        with load(directory, cuda_graphs=captured, prefix_cache=False) as runtime:
            tokens[captured] = [
                [out.token_ids for out in runtime.generate(some, GREEDY)]
                for some in (asked[:1], asked[2:3], asked[:4], asked, asked[5:6])
            ]
            graph_steps[captured] = runtime.stats()["graph_steps"]
            assert runtime.stats()["slots_free"] == LIMITS.max_requests
    assert graph_steps[True] > 60 and graph_steps[False] == 0
    assert tokens[True] == tokens[False]


def test_decode_steps_of_1_to_64_rows_allocate_nothing_and_move_no_pointer(tmp_path: Path) -> None:
    limits = trivet.Limits(max_requests=64, max_step_tokens=512, max_context=512, page_size=16)
    longest = trivet.Sampling(max_new_tokens=300, temperature=0.0, ignore_eos=True)
    with load(make(tmp_path, 6, 3), limits=limits, kv_pages=2048) as runtime:
        engine = runtime._engine

        def pointers() -> list[object]:
            held = [owner.buffers.pointers() for owner in engine.owners.values()]
            return [*held, *(buffers.pointers() for buffers in engine.owned.values())]

        handles: list[trivet.Request] = []
        first, seen = pointers(), []
        for rows in (1, 2, 3, 5, 8, 9, 17, 31, 33, 49, 64):
            # From just before the end of a page and of a chunk on, so that contexts cross both.
            handles += [
                runtime.submit(drawn_prompt(59 + place % 7, place), longest) for place in range(len(handles), rows)
            ]
            while runtime.step().path != "decode":
                pass
            for _ in range(3):
                runtime.step()
            before = runtime.stats()
            for _ in range(10):
                report = runtime.step()
                assert (report.path, report.rows) == ("decode", rows)
            after = runtime.stats()
            assert after["device_allocations"] == before["device_allocations"], rows
            assert after["graph_steps"] == before["graph_steps"] + 10, rows
            assert pointers() == first, rows
            seen.append(rows)
        assert seen[-1] == limits.max_requests
        for handle in handles[::2]:
            handle.cancel()
        while runtime.step().path != "decode":
            pass
        assert pointers() == first
        for handle in handles:
            handle.cancel()
        runtime.run_until_idle()
        assert runtime.stats()["slots_free"] == limits.max_requests


def test_a_state_made_nan_in_a_captured_step_ends_its_request_alone(tmp_path: Path) -> None:
    directory, outs = make(tmp_path, 6, 2), []
    for poisoned in (False, True):  # the batch becomes as small when the request is cancelled in the same place
        with load(directory, prefix_cache=False) as runtime:
            handles = [runtime.submit(drawn_prompt(20 + place, place), GREEDY) for place in range(3)]
            for _ in range(10):
                runtime.step()
            if poisoned:
                state = runtime._engine.state
                for layer in runtime._engine.blueprint.geometry.recurrent_layers:
                    state.recurrent(layer)[handles[1]._scheduled.slot].fill_(float("nan"))
            runtime.step()
            handles[1].cancel()
            runtime.run_until_idle()
            outs.append([handle.completion for handle in handles])
            (following,) = runtime.generate([drawn_prompt(30)], GREEDY)  # in a slot that held NaN
            outs[-1].append(following)
            assert runtime.stats()["slots_free"] == LIMITS.max_requests
    whole, faulty = outs
    assert whole[1].finish_reason == "cancelled" and faulty[1].finish_reason == "error"
    for place in (0, 2, 3):
        assert faulty[place].finish_reason == "length"
        assert faulty[place].token_ids == whole[place].token_ids


@pytest.mark.parametrize("policy", ["tuned", "pinned"])
def test_nan_in_all_that_is_free_reaches_no_row(policy: str, tmp_path: Path) -> None:
    """Everywhere before the first step; then in free and padding pages, page tails, free and padding slots and free
    snapshots before every step."""
    directory, outs = make(tmp_path, 6, 3), []
    for poisoned in (False, True):
        with load(directory, limits=CHUNKED, numeric_policy=policy) as runtime:
            engine = runtime._engine
            if poisoned:
                for buffers in (engine.cache.buffers, engine.state.slots, engine.state.snapshots):
                    for spec in buffers.layout.specs:
                        buffers[spec.name].fill_(NAN)
            kinds, completions = set(), []
            for asked in (prompts(), prompts()[::-1]):  # the second time from snapshots
                handles = [runtime.submit(prompt, REPORTED) for prompt in asked]
                while not all(handle.done for handle in handles):
                    if poisoned:
                        assert poison(runtime)
                    kinds.add(runtime.step().path)
                completions += [handle.completion for handle in handles]
            outs.append(said(completions))
            assert kinds >= {"prefill", "mixed", "decode"}
            assert runtime.stats()["graph_steps"] > 0 and runtime.stats()["prefix_hit_tokens"] > 0
    assert outs[0] == outs[1]


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_steps_of_any_kind_take_no_new_segment_once_warm(prefix_cache: bool, tmp_path: Path) -> None:
    """Prompts are other ones of the same lengths each time, so that each is computed, and leaves its snapshots."""
    lengths = (71, 87, 110, 230, 73, 33, 90, 5)
    with load(make(tmp_path, 6, 3), limits=CHUNKED, prefix_cache=prefix_cache) as runtime:

        def serve(seed: int) -> set[str]:
            handles = [runtime.submit(drawn_prompt(tokens, seed + tokens), GREEDY) for tokens in lengths]
            kinds = set()
            while not all(handle.done for handle in handles):
                kinds.add(runtime.step().path)
            return kinds

        for warming in range(2):
            serve(1000 * warming)
        before = torch.cuda.memory_stats()["segment.all.allocated"]
        assert serve(2000) >= {"prefill", "mixed", "decode"}
        assert torch.cuda.memory_stats()["segment.all.allocated"] == before
        assert runtime.stats()["prefix_hit_tokens"] == 0


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_the_ledgers_owned_lines_equal_what_torch_holds(
    cuda_graphs: bool, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """To the byte, those of recurrent state and snapshots too; beside them graphs hold no more than is planned."""
    group, expansion, layers, width = 6, 3, 2, 64
    load_one = partial(load, make(tmp_path, group, expansion), cuda_graphs=cuda_graphs)
    with load_one() as warm:  # libraries allocate workspaces of their own at their first call
        warm.generate([[1, 2, 3]], trivet.Sampling(max_new_tokens=2))
    del warm
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    with load_one() as runtime:
        gc.collect()
        torch.cuda.synchronize()
        held = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
        owned = runtime._engine.owned
        planned = {line.name: line.bytes for line in runtime.memory.items if line.owned}
        assert {name: buffers.storage_bytes for name, buffers in owned.items()} == planned
        value_heads = 2 * expansion
        channels = (2 * 2 + value_heads) * width
        one_bytes = layers * (value_heads * width * width * 4 + channels * 3 * 2)
        assert planned["recurrent state"] == (LIMITS.max_requests + PADDING_SLOTS) * one_bytes
        assert planned["snapshots"] == runtime.stats()["snapshots_total"] * one_bytes > 0
        on_device = sum(spec.bytes for buffers in owned.values() for spec in buffers.layout.specs if not spec.pinned)
        graphs = sum(line.bytes for line in runtime.memory.items if line.name == GRAPHS_LINE)
        record_property("torch_requested_bytes", held)
        record_property("owned_device_bytes", on_device)
        record_property("planned_graph_bytes", graphs)
        assert (graphs > 0) == cuda_graphs
        # A library's workspace for the stream of the first runtime's capture may be given back by the second's.
        assert -graphs <= held - on_device <= graphs + 64 * 1024, (held, on_device)
        assert runtime.memory == trivet.plan_memory(
            tmp_path,
            device=runtime._engine.blueprint.capacity.device,
            dtype="bfloat16",
            limits=LIMITS,
            kv_pages=512,
            snapshot_stride=STRIDE,
            attention="flashinfer",
            cuda_graphs=cuda_graphs,
        )


@pytest.mark.parametrize("policy", ["tuned", "pinned"])
def test_a_prompt_takes_one_step_whatever_snapshots_it_leaves_and_is_hit_at_the_last(
    policy: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """What is said after a hit is what is said without a cache: as likely where bits may differ, or the same."""
    shared, ends = drawn_prompt(300), [drawn_prompt(tokens, tokens) for tokens in (90, 111, 64)]
    directory, outs = make(tmp_path, 6, 3), []
    with load(directory, numeric_policy=policy) as runtime:
        for end in ends:
            prompt = [*shared, *end]
            handle = runtime.submit(prompt, GREEDY)
            report = runtime.step()
            assert (report.path, report.prefill_tokens) == ("prefill", len(prompt) - handle._scheduled.cached_tokens)
            runtime.run_until_idle()
            warm = runtime.generate([prompt], GREEDY)[0]
            assert warm.cached_tokens == (len(prompt) - 1) // STRIDE * STRIDE
            outs += [(prompt, list(handle.completion.token_ids)), (prompt, list(warm.token_ids))]
        assert handle.completion.cached_tokens == 300 // STRIDE * STRIDE  # the second prompt left it for the third
    with load(directory, numeric_policy=policy, prefix_cache=False) as cold:
        if policy == "pinned":
            assert [new for _, new in outs] == [list(cold.generate([p], GREEDY)[0].token_ids) for p, _ in outs]
        worst = max(max(regrets(cold, prompt, new)) for prompt, new in outs)
        record_property("worst_regret_nats", worst)
        assert worst <= REGRET_NATS


@pytest.mark.parametrize(("group", "expansion"), SHAPES)
def test_under_the_pinned_policy_tokens_are_the_same_bits_however_they_are_served(
    group: int, expansion: int, tmp_path: Path
) -> None:
    directory = make(tmp_path, group, expansion)
    pinned = partial(load, directory, numeric_policy="pinned")
    asked = prompts()
    samplings = [REPORTED, DRAWN] * (len(asked) // 2)
    with pinned(cuda_graphs=False, prefix_cache=False) as runtime:
        alone = said([runtime.generate([p], sampling)[0] for p, sampling in zip(asked, samplings, strict=True)])
        scores = [runtime.score(prompt, top=3) for prompt in asked if len(prompt) > 1]
        assert said(runtime.generate(asked, samplings)) == alone, "in a batch"
    with pinned() as runtime:
        assert said(runtime.generate(asked, samplings)) == alone, "through graphs, shared prefixes"
        assert runtime.stats()["graph_steps"] > 0
        hits = runtime.stats()["prefix_hit_tokens"]
        assert said(runtime.generate(asked[::-1], samplings[::-1])) == alone[::-1], "warm, in other places"
        assert runtime.stats()["prefix_hit_tokens"] > hits
        assert said(runtime.generate(asked[:3], samplings[:3])) == alone[:3], "warm, beside padding rows"
    for settings in ({}, {"cuda_graphs": False, "prefix_cache": False}):
        with pinned(limits=CHUNKED, **settings) as runtime:
            kinds = set()
            handles = [runtime.submit(p, sampling) for p, sampling in zip(asked, samplings, strict=True)]
            while not all(handle.done for handle in handles):
                kinds.add(runtime.step().path)
            assert kinds >= {"prefill", "mixed", "decode"}
            assert said([handle.completion for handle in handles]) == alone, f"in chunks, {settings}"
            found = [runtime.score(prompt, top=3) for prompt in asked if len(prompt) > 1]
            assert found == scores, f"scores in chunks, {settings}"


def test_under_the_pinned_policy_the_next_turn_of_a_chat_is_served_as_if_it_were_the_first(tmp_path: Path) -> None:
    directory = make(tmp_path, 6, 3)
    longer = trivet.Sampling(max_new_tokens=150, temperature=0.0, ignore_eos=True)
    with load(directory, numeric_policy="pinned") as runtime:
        turn = drawn_prompt(100)
        said_first = runtime.generate([turn], longer)[0].token_ids
        following = [*turn, *said_first, *drawn_prompt(40, 1)]
        second = runtime.generate([following], longer)[0]
        third = runtime.generate([following], longer)[0]
    with load(directory, numeric_policy="pinned", prefix_cache=False) as runtime:
        (alone,) = runtime.generate([following], longer)
    assert (second.cached_tokens, third.cached_tokens) == (64, (len(following) - 1) // STRIDE * STRIDE)
    assert second.token_ids == third.token_ids == alone.token_ids


def test_every_request_of_mixed_traffic_under_pressure_is_served_as_if_it_were_alone(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    directory = make(tmp_path, 6, 3)
    limits = trivet.Limits(max_requests=12, max_step_tokens=160, max_context=512, page_size=16)
    with load(directory, limits=limits, kv_pages=80, snapshot_bytes=0, numeric_policy="pinned") as runtime:
        assert runtime.stats()["snapshots_total"] == 0
        one_bytes = runtime._engine.state.slots.layout.total_bytes // (limits.max_requests + 1)
    served = assert_served_as_alone(
        partial(load, directory, limits=limits, kv_pages=80, snapshot_bytes=6 * one_bytes, numeric_policy="pinned"),
        drawn_traffic(VOCABULARY, requests=200, longest_prompt=260),
    )
    record_property("served", str(served))
    assert served.finished >= 180 and served.most_waiting > 0
    assert served.hit_tokens > 0 and served.graph_steps > 0


def test_what_the_pinned_policy_needs_of_the_limits_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    directory = make(tmp_path, 4, 1)
    narrow = trivet.Limits(max_requests=8, max_step_tokens=64, max_context=512, page_size=16)
    with pytest.raises(trivet.ConfigError, match="max_step_tokens is 64, expected at least 71"):
        load(directory, numeric_policy="pinned", limits=narrow)
    with pytest.raises(trivet.ConfigError, match="snapshot_stride is 32, expected a multiple of 64"):
        load(directory, numeric_policy="pinned", snapshot_stride=32)
