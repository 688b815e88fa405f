"""Weights reach a CUDA device through page-locked blocks bit for bit, and nothing of the way there stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.gpu.test_qwen3_on_cuda import load, make
from torch import Tensor

import trivet
from trivet.dtypes import SERVED
from trivet.weights import staging
from trivet.weights.checkpoint import Checkpoint
from trivet.weights.loader import load_parameters
from trivet.weights.map import ParameterSpec, Part, WeightMap
from trivet.weights.save import write_checkpoint
from trivet.weights.staging import Stager, page_locked, pieces, send_to_device

SLEEP_CYCLES = 200_000_000
"""Of a kernel in front of the copies: about a tenth of a second, in which the host could fill every block often."""

BLOCK_BYTES = 40_000
"""Some tensors below go through in one piece, others in many; rows of one are larger than a block."""

WEIGHTS = WeightMap(
    (
        ParameterSpec("qkv", (700, 256), (Part("q", (400, 256)), Part("k", (150, 256)), Part("v", (150, 256)))),
        ParameterSpec("wide", (5, 30_001), (Part("a", (2, 30_001)), Part("b", (3, 30_001)))),
        ParameterSpec("conv", (96, 4), (Part("conv1d", (96, 1, 4)),)),
        ParameterSpec("decay", (33,), (Part("A_log", (33,)),), dtype="float32"),
        ParameterSpec("norm", (256,), (Part("norm", (256,)),)),
    )
)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The blocks that were page-locked, found so while they were in use."""
    seen: list[Tensor] = []

    @contextmanager
    def noted(size_bytes: int) -> Iterator[Tensor]:
        with page_locked(size_bytes) as block:
            assert block.is_pinned() and block.nbytes == size_bytes
            seen.append(block)
            yield block

    monkeypatch.setattr(staging, "page_locked", noted)
    return seen


def write(directory: Path, dtype: str) -> None:
    generator = torch.Generator().manual_seed(3)
    drawn = {spec.name: torch.randn(spec.shape, generator=generator) * 1e3 for spec in WEIGHTS.parameters}
    write_checkpoint(directory, {}, WEIGHTS, drawn, dtype, shards=2)


@pytest.mark.parametrize("served", SERVED)
@pytest.mark.parametrize("stored", SERVED)
def test_a_checkpoint_has_the_bits_that_the_host_loads_however_late_the_device_copies(
    stored: str, served: str, tmp_path: Path, blocks: list[Tensor]
) -> None:
    write(tmp_path, stored)
    layout = WEIGHTS.layout(served)
    expected = load_parameters(Checkpoint.open(tmp_path), WEIGHTS, layout.allocate("cpu"), served)
    assert not blocks
    buffers = layout.allocate("cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda._sleep(SLEEP_CYCLES)
    found = load_parameters(Checkpoint.open(tmp_path), WEIGHTS, buffers, served, block_bytes=BLOCK_BYTES)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    for name, parameter in expected.items():
        assert found[name].is_cuda and found[name].dtype == parameter.dtype
        assert torch.equal(found[name].cpu(), parameter), name
    assert len(blocks) == staging.BLOCKS and not any(block.is_pinned() for block in blocks)


@pytest.mark.parametrize("waits", [True, False])
def test_blocks_that_were_refilled_too_early_would_show(waits: bool) -> None:
    block_bytes = 10 * BLOCK_BYTES
    source = torch.randn(40, block_bytes // 4, generator=torch.Generator().manual_seed(1))
    target = torch.zeros_like(source, device="cuda")
    heedless = SimpleNamespace(synchronize=lambda: None)

    def send(into: Tensor, staged: Tensor) -> staging.Queued:
        event = send_to_device(into, staged)
        return event if waits else heedless

    with ExitStack() as locked:
        stager = Stager([locked.enter_context(page_locked(block_bytes)) for _ in range(staging.BLOCKS)], send)
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        for into, piece in pieces(target, source, block_bytes):
            stager.copy(into, piece)
        torch.cuda.synchronize()
    assert torch.equal(target.cpu(), source) is waits


def test_a_strided_tensor_arrives_in_its_strides() -> None:
    source = torch.randn(300, 200, generator=torch.Generator().manual_seed(2)).bfloat16().T
    target = torch.zeros(300, 200, device="cuda").T
    with staging.staged_copies(BLOCK_BYTES) as copy:
        for into, piece in pieces(target, source, BLOCK_BYTES):
            copy(into, piece)
    assert torch.equal(target.cpu(), source.float())


def test_a_load_that_is_broken_off_gives_its_blocks_back(tmp_path: Path, blocks: list[Tensor]) -> None:
    write(tmp_path, "float32")

    def interrupted(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    buffers = WEIGHTS.layout("bfloat16").allocate("cuda")
    with pytest.raises(KeyboardInterrupt):
        load_parameters(Checkpoint.open(tmp_path), WEIGHTS, buffers, "bfloat16", interrupted, BLOCK_BYTES)
    assert len(blocks) == staging.BLOCKS and not any(block.is_pinned() for block in blocks)


@pytest.mark.parametrize("weights", ["checkpoint", "random"])
def test_progress_of_a_start_counts_weights_and_then_captured_steps_up_to_one_total(
    weights: str, tmp_path: Path, blocks: list[Tensor]
) -> None:
    directory = make(tmp_path, 4, 128)
    told: list[tuple[int, int]] = []
    with load(
        directory, "flashinfer", weights=weights, progress=lambda done, total: told.append((done, total))
    ) as runtime:
        blueprint = runtime._engine.blueprint
        held = {name: tensor.cpu() for name, tensor in runtime._engine.owned["weights"]._tensors.items()}
    done = [ready for ready, _ in told]
    weights_bytes = blueprint.weights.total_bytes
    total = weights_bytes + blueprint.ledger.line("CUDA graphs").bytes
    assert {of for _, of in told} == {total} and done[-1] == total
    assert done == sorted(set(done)) and weights_bytes in done
    steps = len(blueprint.capacity.graph_buckets) + len(blueprint.capacity.prompt_buckets)
    assert steps == len(done) - 1 - done.index(weights_bytes) > 1
    if weights == "checkpoint":
        with trivet.Runtime.load(directory, device="cpu", dtype="bfloat16", autostart=False) as host:
            assert all(torch.equal(host._engine.owned["weights"][name], tensor) for name, tensor in held.items())
    assert len(blocks) == (staging.BLOCKS if weights == "checkpoint" else 0)
    assert not any(block.is_pinned() for block in blocks)
