"""Tiny Qwen3 models on a CUDA device: FlashInfer against the reference backend, and the ledger against torch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.support.checkpoints import make_qwen3

import trivet
import trivet_qwen3
from trivet.attention.flashinfer.kinds import DecodeKernel
from trivet.attention.flashinfer.owner import FlashInferOwner
from trivet.attention.flashinfer.paths import FlashInferPath
from trivet.attention.flashinfer.speeds import SpeedTable
from trivet.attention.reference.owner import ReferenceOwner
from trivet.attention.reference.path import ReferencePath

LIMITS = trivet.Limits(max_requests=6, max_step_tokens=96, max_context=512, page_size=16)
VOCABULARY = 97
REGRET_NATS = 0.2
"""The most that a token may be less likely than the best one, by the other backend's log-probabilities."""
MEAN_NATS, P99_NATS = 0.06, 0.2
"""Bounds on differences of log-probabilities between two backends in bfloat16."""

SHAPES = [(4, 64), (5, 64), (6, 64), (4, 128), (5, 128), (6, 128), (7, 128), (5, 256), (6, 256)]


@pytest.fixture(params=list(DecodeKernel), ids=lambda kernel: kernel.name.lower())
def only_kernel(request: pytest.FixtureRequest) -> Iterator[DecodeKernel]:
    """Qwen3 with one FlashInfer path alone, whatever the committed table says of its speed."""
    family, paths = trivet_qwen3.FAMILY, trivet_qwen3.FAMILY.decode_paths
    forced = FlashInferPath(request.param, SpeedTable({}), forced=True)
    object.__setattr__(family, "decode_paths", (forced, ReferencePath()))
    yield request.param
    object.__setattr__(family, "decode_paths", paths)


def make(directory: Path, group: int, head_dim: int) -> Path:
    make_qwen3(
        directory,
        seed=group,
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_attention_heads=2 * group,
        num_key_value_heads=2,
        head_dim=head_dim,
    )
    return directory


def load(directory: Path, attention: str, **settings: object) -> trivet.Runtime:
    options: dict[str, object] = {"kv_pages": 256, "limits": LIMITS, "autostart": False} | settings
    return trivet.Runtime.load(directory, device="cuda", dtype="bfloat16", attention=attention, **options)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(0, VOCABULARY, (70,), generator=generator).tolist()
    own = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in (1, 17, 40, 160, 3, 33, 90, 5)]
    return [[*shared, *tail] for tail in own[:5]] + own[5:]


def differences(ours: trivet.Runtime, theirs: trivet.Runtime, token_ids: list[int]) -> torch.Tensor:
    """How far the log-probabilities of every token at every position are apart."""
    tables = []
    for runtime in (ours, theirs):
        scores = runtime.score(token_ids, top=VOCABULARY)
        table = torch.empty(len(scores), VOCABULARY)
        for row, score in enumerate(scores):
            ids = torch.tensor([token for token, _ in score.top])
            table[row, ids] = torch.tensor([value for _, value in score.top])
        tables.append(table)
    return (tables[0] - tables[1]).abs().flatten()


def regrets(runtime: trivet.Runtime, prompt: list[int], new: list[int]) -> list[float]:
    """How much less likely than the best each new token is, by `runtime`."""
    scores = runtime.score([*prompt, *new], top=1)[len(prompt) - 1 :]
    return [score.top[0][1] - score.logprob for score in scores]


@pytest.mark.parametrize(("group", "head_dim"), SHAPES)
def test_flashinfer_gives_what_the_reference_backend_gives_in_every_kind_of_step(
    group: int, head_dim: int, only_kernel: DecodeKernel, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    directory = make(tmp_path, group, head_dim)
    if only_kernel is DecodeKernel.COMPILED and group in (5, 7):
        with pytest.raises(trivet.ConfigError, match=f"not compiled for group size {group}"):
            load(directory, "flashinfer")
        return
    sampling = trivet.Sampling(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    with load(directory, "flashinfer") as ours, load(directory, "reference") as theirs:
        assert [type(owner) for owner in ours._engine.owners.values()] == [FlashInferOwner]
        assert [type(owner) for owner in theirs._engine.owners.values()] == [ReferenceOwner]
        (selection,) = ours._engine.blueprint.selections.values()
        assert selection.path.name == FlashInferPath(only_kernel).name
        far = torch.cat([differences(ours, theirs, prompt) for prompt in prompts() if len(prompt) > 1])
        record_property("mean_nats", float(far.mean()))
        record_property("p99_nats", float(far.quantile(0.99)))
        record_property("max_nats", float(far.max()))
        assert far.mean() <= MEAN_NATS and far.quantile(0.99) <= P99_NATS
        kinds, handles = set(), [ours.submit(prompt, sampling) for prompt in prompts()]
        while not all(handle.done for handle in handles):
            kinds.add(ours.step().path)
        assert kinds >= {"prefill", "mixed", "decode"}
        batched = [list(handle.completion.token_ids) for handle in handles]
        alone = [list(out.token_ids) for prompt in prompts()[:3] for out in ours.generate([prompt], sampling)]
        again = [list(out.token_ids) for prompt in prompts()[:3] for out in ours.generate([prompt], sampling)]
        assert alone == again, "two sequential runs differ"
        assert ours.stats()["prefix_hit_tokens"] > 0
        worst = max(max(regrets(theirs, p, new)) for p, new in zip(prompts(), batched, strict=True))
        worst = max(worst, *(max(regrets(theirs, p, new)) for p, new in zip(prompts()[:3], alone, strict=True)))
        record_property("worst_regret_nats", worst)
        assert worst <= REGRET_NATS
        assert ours.stats()["pages_held"] == 0


@pytest.mark.parametrize("attention", ["flashinfer", "reference"])
def test_the_ledgers_owned_lines_equal_what_torch_holds(
    attention: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    directory = make(tmp_path, 5, 128)
    settings: dict[str, object] = {"cuda_graphs": False}  # what graphs hold is a bound, not a layout
    with load(
        directory, attention, **settings
    ) as warm:  # libraries allocate workspaces of their own at their first call
        warm.generate([[1, 2, 3]], trivet.Sampling(max_new_tokens=2))
    del warm
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    with load(directory, attention, **settings) as runtime:
        gc.collect()
        torch.cuda.synchronize()
        held = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
        owned = runtime._engine.owned
        assert {line.name for line in runtime.memory.items if line.owned} == set(owned)
        for line in runtime.memory.items:
            if line.owned:
                assert owned[line.name].storage_bytes == line.bytes, line.name
        on_device = sum(spec.bytes for buffers in owned.values() for spec in buffers.layout.specs if not spec.pinned)
        pinned = sum(spec.bytes for buffers in owned.values() for spec in buffers.layout.specs if spec.pinned)
        record_property("torch_requested_bytes", held)
        record_property("owned_device_bytes", on_device)
        record_property("owned_pinned_bytes", pinned)
        assert 0 <= held - on_device <= 64 * 1024, (held, on_device)
        assert pinned > 0
        planned = trivet.plan_memory(
            directory,
            device=runtime._engine.blueprint.capacity.device,
            dtype="bfloat16",
            limits=LIMITS,
            kv_pages=256,
            attention=attention,
            cuda_graphs=False,
        )
        assert planned == runtime.memory


def test_the_plan_of_an_absent_h200_equals_the_plan_of_the_one_here(tmp_path: Path) -> None:
    directory = make(tmp_path, 5, 128)
    with load(directory, "flashinfer") as runtime:
        if "h200" not in runtime._engine.blueprint.capacity.device.name.lower():
            pytest.skip("this machine has another device")
        planned = trivet.plan_memory(
            directory, device="h200", dtype="bfloat16", limits=LIMITS, kv_pages=256, attention="flashinfer"
        )
        assert planned.items == runtime.memory.items


def test_the_backend_is_chosen_by_predicates_and_serves_from_its_own_thread(tmp_path: Path) -> None:
    directory = make(tmp_path, 5, 128)
    sampling = trivet.Sampling(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    outputs = []
    for autostart in (True, False):
        with trivet.Runtime.load(
            directory, dtype="bfloat16", kv_pages=64, limits=LIMITS, autostart=autostart
        ) as runtime:
            (selection,) = runtime._engine.blueprint.selections.values()
            assert selection.path.backend == "flashinfer", selection.verdicts
            outputs.append([list(out.token_ids) for out in runtime.generate(prompts()[:1], sampling)])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 128), ("bfloat16", 32)])
def test_what_flashinfer_does_not_serve_goes_to_the_reference_backend(
    dtype: str, head_dim: int, tmp_path: Path
) -> None:
    directory = make(tmp_path, 4, head_dim)
    with trivet.Runtime.load(directory, device="cuda", dtype=dtype, kv_pages=64, limits=LIMITS) as runtime:
        (selection,) = runtime._engine.blueprint.selections.values()
        assert selection.path.name == "reference"
        assert len(runtime.generate([[1, 2, 3]], trivet.Sampling(max_new_tokens=4, ignore_eos=True))[0].token_ids) == 4
    with pytest.raises(trivet.ConfigError, match="no decode path of backend 'flashinfer'"):
        trivet.Runtime.load(directory, device="cuda", dtype=dtype, kv_pages=64, limits=LIMITS, attention="flashinfer")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA devices")
def test_a_device_that_is_not_the_current_one_gives_the_same_tokens(tmp_path: Path) -> None:
    directory = make(tmp_path, 5, 128)
    sampling = trivet.Sampling(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    outputs = []
    for device in ("cuda:0", "cuda:1"):
        settings = {"kv_pages": 256, "limits": LIMITS, "autostart": False, "dtype": "bfloat16"}
        with trivet.Runtime.load(directory, device=device, attention="flashinfer", **settings) as runtime:
            outputs.append([list(out.token_ids) for out in runtime.generate(prompts(), sampling)])
    assert torch.cuda.current_device() == 0
    assert outputs[0] == outputs[1]
