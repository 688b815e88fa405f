"""Under ``numeric_policy="pinned"`` no bit of a result depends on the batch, on chunking, on graphs or on the cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.test_qwen3_on_cuda import VOCABULARY, load, make, prompts
from tests.support.alone import assert_served_as_alone, drawn_traffic
from torch import Tensor

import trivet
from trivet.sampling.logprobs import token_logprobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_CUDA = pytest.mark.skipif(DEVICE == "cpu", reason="what runs on a device is of interest")
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

BATCHES = (2, 17, 64, 65, 300) if DEVICE == "cuda" else (2, 65)

LIMITS = trivet.Limits(max_requests=8, max_step_tokens=512, max_context=512, page_size=16)
CHUNKED = trivet.Limits(max_requests=8, max_step_tokens=24, max_context=512, page_size=16)
REPORTED = trivet.Sampling(max_new_tokens=16, ignore_eos=True, logprobs=4)
DRAWN = trivet.Sampling(max_new_tokens=16, ignore_eos=True, temperature=0.9, seed=5, top_p=0.9, logprobs=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("outputs", "inner", "epilogue"), [(256, 512, "plain"), (330, 130, "residual"), (107, 501, "bias")]
)
def test_a_row_has_the_same_bits_alone_and_at_every_place_of_any_batch(
    outputs: int, inner: int, epilogue: str, dtype: torch.dtype
) -> None:
    from trivet.ops.fused.pinned import PinnedConfig, PinnedMatmul

    generator = torch.Generator().manual_seed(outputs + inner)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        if DEVICE == "cpu":  # numpy interprets the kernel, in an order of its own: where sums are exact, none shows
            return torch.randint(-8, 9, shape, generator=generator).div(8).to(dtype)
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)

    weight = drawn(outputs, inner, scale=inner**-0.5)
    x, before = drawn(BATCHES[-1], inner), drawn(BATCHES[-1], outputs)
    bias = drawn(outputs) if epilogue == "bias" else None
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    if epilogue == "residual":
        expected += before.double()
    slack = 1e-5 * (x.double().abs() @ weight.double().abs().T)
    for product in (PinnedMatmul(weight), PinnedMatmul(weight, config=PinnedConfig())):

        def of(rows: slice | Tensor, product: PinnedMatmul = product) -> Tensor:
            return product(x[rows], bias, before[rows].clone() if epilogue == "residual" else None)

        alone = torch.cat([of(slice(row, row + 1)) for row in range(len(x))])
        assert ((alone.double() - expected).abs() <= HALF_STEP[dtype] * expected.abs() + slack).all()
        for rows in BATCHES:
            assert torch.equal(of(slice(0, rows)), alone[:rows]), rows
            assert torch.equal(of(slice(len(x) - rows, None)), alone[-rows:]), rows
        order = torch.randperm(len(x), generator=generator).to(DEVICE)
        assert torch.equal(of(order), alone[order])


@pytest.mark.parametrize("rows", [1, 64, 70])
def test_what_the_other_rows_hold_reaches_no_row_even_if_it_is_nan(rows: int) -> None:
    from trivet.ops.fused.pinned import PinnedMatmul

    generator = torch.Generator().manual_seed(rows)
    weight, x = (torch.randint(-8, 9, (n, 192), generator=generator).bfloat16().to(DEVICE) for n in (96, rows))
    product = PinnedMatmul(weight)
    alone = product(x)
    beside = torch.full((rows + 70, 192), math.nan, dtype=x.dtype, device=x.device)
    beside[35 : 35 + rows] = x
    found = product(beside)
    assert torch.equal(found[35 : 35 + rows], alone)
    assert found[:35].isnan().all() and found[35 + rows :].isnan().all()


@ON_CUDA
@pytest.mark.parametrize(("outputs", "inner"), [(5120, 5120), (34816, 1024)])
def test_products_of_a_large_model_are_the_same_bits_for_one_row_and_for_thousands(outputs: int, inner: int) -> None:
    from trivet.ops.fused.pinned import PinnedMatmul

    generator = torch.Generator(DEVICE).manual_seed(outputs)
    weight = torch.randn(outputs, inner, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(4099, inner, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    product = PinnedMatmul(weight, dependent=torch.cuda.get_device_capability() >= (9, 0))
    together = product(x)
    for rows in (slice(0, 1), slice(63, 64), slice(64, 65), slice(1000, 1064), slice(2048, 4098), slice(4098, 4099)):
        assert torch.equal(product(x[rows]), together[rows])
    assert all(torch.equal(product(x), together) for _ in range(5))


@ON_CUDA
@pytest.mark.parametrize("vocabulary", [97, 1101, 1102, 4097, 50004])
def test_log_probabilities_of_a_row_do_not_depend_on_its_place(vocabulary: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(vocabulary)
    logits = 4 * torch.randn(37, vocabulary, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    targets = torch.randint(0, vocabulary, (37,), generator=generator, device=DEVICE)
    together = token_logprobs(logits, targets, 5)
    for row in range(37):
        alone = token_logprobs(logits[row : row + 1], targets[row : row + 1], 5)
        assert torch.equal(alone.chosen[0], together.chosen[row])
        assert torch.equal(alone.top[0], together.top[row]) and torch.equal(alone.top_ids[0], together.top_ids[row])
    expected = logits.double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert torch.allclose(together.chosen.double(), expected, rtol=0, atol=1e-4)


def pinned(directory: Path, **settings: Any) -> trivet.Runtime:
    return load(directory, "flashinfer", **({"limits": LIMITS, "numeric_policy": "pinned"} | settings))


def said(completions: list[trivet.Completion]) -> list[tuple[object, ...]]:
    assert all(completion.finish_reason == "length" for completion in completions)
    return [(completion.token_ids, completion.logprobs) for completion in completions]


@ON_CUDA
@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (5, 128), (6, 64)])
def test_tokens_and_log_probabilities_are_the_same_bits_however_they_are_served(
    group: int, head_dim: int, tmp_path: Path
) -> None:
    directory = make(tmp_path, group, head_dim)
    samplings = [REPORTED, DRAWN] * (len(prompts()) // 2)
    with pinned(directory, cuda_graphs=False, prefix_cache=False) as runtime:
        (selection,) = runtime._engine.blueprint.selections.values()
        assert selection.path.name == "split-kv-pinned"
        alone = said([runtime.generate([p], sampling)[0] for p, sampling in zip(prompts(), samplings, strict=True)])
        scores = [runtime.score(prompt, top=3) for prompt in prompts() if len(prompt) > 1]
        assert said(runtime.generate(prompts(), samplings)) == alone, "in a batch"
    with pinned(directory) as runtime:
        assert said(runtime.generate(prompts(), samplings)) == alone, "through graphs, shared prefixes"
        assert runtime.stats()["graph_steps"] > 0
        hits = runtime.stats()["prefix_hit_tokens"]
        assert said(runtime.generate(prompts()[::-1], samplings[::-1])) == alone[::-1], "warm, in other places"
        assert runtime.stats()["prefix_hit_tokens"] > hits
        assert said(runtime.generate(prompts()[:3], samplings[:3])) == alone[:3], "warm, beside padding rows"
    for settings in ({}, {"cuda_graphs": False, "prefix_cache": False}):
        with pinned(directory, limits=CHUNKED, **settings) as runtime:
            kinds = set()
            handles = [runtime.submit(p, sampling) for p, sampling in zip(prompts(), samplings, strict=True)]
            while not all(handle.done for handle in handles):
                kinds.add(runtime.step().path)
            assert kinds >= {"prefill", "mixed", "decode"}
            assert said([handle.completion for handle in handles]) == alone, f"in chunks, {settings}"
            found = [runtime.score(prompt, top=3) for prompt in prompts() if len(prompt) > 1]
            assert found == scores, f"scores in chunks, {settings}"


@ON_CUDA
def test_every_request_of_mixed_traffic_under_pressure_is_served_as_if_it_were_alone(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    directory = make(tmp_path, 5, 128)
    limits = trivet.Limits(max_requests=16, max_step_tokens=64, max_context=256, page_size=16)
    served = assert_served_as_alone(
        partial(pinned, directory, limits=limits, kv_pages=60), drawn_traffic(VOCABULARY, requests=200)
    )
    record_property("served", str(served))
    assert served.finished >= 180 and served.most_waiting > 0
    assert served.hit_tokens > 0 and served.graph_steps > 0
