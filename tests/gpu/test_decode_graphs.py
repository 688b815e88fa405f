"""Decode through CUDA graphs: the same tokens as without, whatever is asked of the sampler, and no allocation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gpu.test_qwen3_on_cuda import load, make, prompts

import trivet

NEW_TOKENS = 24

SAMPLINGS = {
    "greedy": trivet.Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True),
    "drawn": trivet.Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.8, seed=3, min_p=0.01),
    "top-k": trivet.Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.1, seed=4, top_k=9),
    "top-p": trivet.Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.9, seed=5, top_p=0.8),
    "penalised": trivet.Sampling(
        max_new_tokens=NEW_TOKENS, ignore_eos=True, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2
    ),
    "reported": trivet.Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=7),
    "reported and drawn": trivet.Sampling(
        max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.7, seed=6, logprobs=2
    ),
    "reported beyond what is captured": trivet.Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=40),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 of group size 5."""
    return make(tmp_path_factory.mktemp("graphs"), 5, 128)


def asked() -> list[trivet.Sampling]:
    """A sampling for each of the eight prompts, all different."""
    return list(SAMPLINGS.values())


@pytest.mark.parametrize("kind", [*SAMPLINGS, "all at once"])
def test_graphs_and_a_step_in_flight_change_no_token(kind: str, directory: Path) -> None:
    sampling = asked() if kind == "all at once" else SAMPLINGS[kind]
    outs = {}
    for name, settings in {
        "eager": {"cuda_graphs": False},
        "graphs": {},
        "in flight": {"autostart": True},
    }.items():
        with load(directory, "flashinfer", **settings) as runtime:
            outs[name] = runtime.generate(prompts(), sampling)
            replayed = runtime.stats()["graph_steps"]
            assert (replayed > 0) == (name != "eager")
    for name in ("graphs", "in flight"):
        for eager, found in zip(outs["eager"], outs[name], strict=True):
            assert found.token_ids == eager.token_ids and found.finish_reason == "length"
            assert (found.logprobs is None) == (eager.logprobs is None)
            for ours, theirs in zip(found.logprobs or (), eager.logprobs or (), strict=True):
                assert ours.token_id == theirs.token_id and len(ours.top) == len(theirs.top)
                assert ours.logprob == pytest.approx(theirs.logprob, abs=0.05)


@pytest.mark.parametrize("kind", [kind for kind in SAMPLINGS if "beyond" not in kind])
def test_a_steady_decode_step_allocates_nothing_on_the_device(kind: str, directory: Path) -> None:
    with load(directory, "flashinfer") as runtime:
        requests = [runtime.submit(prompt[:15], SAMPLINGS[kind]) for prompt in (*prompts()[:4], prompts()[5])]
        reports = [runtime.step() for _ in range(8)]
        assert reports[-1].path == "decode" and reports[-1].rows == 5
        before = runtime.stats()["device_allocations"]
        pointers = [owner.buffers.pointers() for owner in runtime._engine.owners.values()]
        for _ in range(12):
            assert runtime.step().path == "decode"
        assert runtime.stats()["device_allocations"] == before
        assert [owner.buffers.pointers() for owner in runtime._engine.owners.values()] == pointers
        runtime.run_until_idle()
        assert all(len(request.completion.token_ids) == NEW_TOKENS for request in requests)


def test_prefill_and_mixed_steps_take_no_new_segment_once_warm(directory: Path) -> None:
    with load(directory, "flashinfer", prefix_cache=False) as runtime:
        for _ in range(2):
            runtime.generate(prompts(), SAMPLINGS["greedy"])
        before = torch.cuda.memory_stats()["segment.all.allocated"]
        runtime.generate(prompts(), SAMPLINGS["greedy"])
        assert torch.cuda.memory_stats()["segment.all.allocated"] == before


def test_nan_in_the_padding_page_free_pages_and_page_tails_reaches_no_row(directory: Path) -> None:
    outs = []
    for poisoned in (False, True):
        with load(directory, "flashinfer") as runtime:
            if poisoned:
                for spec in runtime._engine.cache.buffers.layout.specs:
                    runtime._engine.cache.buffers[spec.name].fill_(float("nan"))
            outs.append([out.token_ids for out in runtime.generate(prompts(), SAMPLINGS["reported"])])
            assert runtime.stats()["graph_steps"] > 0
    assert outs[0] == outs[1]


def test_a_row_made_nan_in_a_captured_step_ends_its_request_alone(directory: Path) -> None:
    outs = []
    for poisoned in (False, True):  # the batch becomes as small when the request is cancelled in the same place
        with load(directory, "flashinfer", prefix_cache=False) as runtime:
            requests = [runtime.submit(prompt, SAMPLINGS["greedy"]) for prompt in prompts()[:3]]
            for _ in range(10):
                runtime.step()
            if poisoned:
                page = requests[1]._scheduled.pages[0]
                for index in runtime._engine.blueprint.geometry.attention_layers:
                    runtime._engine.cache.layer(index)[0][page].fill_(float("nan"))
            runtime.step()
            requests[1].cancel()
            runtime.run_until_idle()
            outs.append([request.completion for request in requests])
            assert runtime.stats()["pages_held"] == 0
    whole, faulty = outs
    assert whole[1].finish_reason == "cancelled" and faulty[1].finish_reason == "error"
    assert isinstance(faulty[1].error, trivet.TrivetError)
    for place in (0, 2):
        assert faulty[place].finish_reason == "length"
        assert faulty[place].token_ids == whole[place].token_ids
