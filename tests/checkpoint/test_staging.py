"""Weights that go to a device through blocks arrive as if they were copied straight, however slow the device is."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trivet.dtypes import SERVED, as_torch
from trivet.errors import CheckpointError
from trivet.weights import loader, staging
from trivet.weights.checkpoint import Checkpoint
from trivet.weights.loader import load_parameters
from trivet.weights.map import ParameterSpec, Part, WeightMap
from trivet.weights.save import write_checkpoint
from trivet.weights.staging import BLOCKS, Stager, pieces

SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


class SlowDevice:
    """Reads what was sent to it as late as it may: when somebody waits for it."""

    def __init__(self) -> None:
        self.queued: deque[tuple[int, Tensor, Tensor]] = deque()
        self.sent = 0
        self.blocks = 0

    def send(self, target: Tensor, staged: Tensor) -> SlowDevice.Arrival:
        self.sent += 1
        self.queued.append((self.sent, target, staged))
        return SlowDevice.Arrival(self, self.sent)

    class Arrival:
        def __init__(self, device: SlowDevice, number: int) -> None:
            self.device, self.number = device, number

        def synchronize(self) -> None:
            while self.device.queued and self.device.queued[0][0] <= self.number:
                _, target, staged = self.device.queued.popleft()
                assert target.dtype == staged.dtype and target.shape == staged.shape and staged.is_contiguous()
                target.copy_(staged)


def blocks(block_bytes: int) -> list[Tensor]:
    return [torch.full((block_bytes,), 255, dtype=torch.uint8) for _ in range(BLOCKS)]


@settings(max_examples=200, deadline=None)
@given(
    tensors=st.lists(st.tuples(SHAPES, DTYPES, DTYPES, st.booleans(), st.booleans()), min_size=1, max_size=6),
    block_bytes=st.integers(1, 30).map(lambda elements: elements * 4),
    seed=st.integers(0, 2**31),
)
def test_tensors_of_any_shape_dtype_and_stride_arrive_whole_through_blocks_of_any_size(
    tensors: list[tuple[tuple[int, ...], torch.dtype, torch.dtype, bool, bool]], block_bytes: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    device = SlowDevice()
    stager = Stager(blocks(block_bytes), device.send)
    wanted, arrived = [], []
    for shape, stored, served, source_turned, target_turned in tensors:
        source = torch.randn(shape, generator=generator).to(stored)
        target = torch.full(shape, 9.0, dtype=served)
        if source_turned:
            source = source.mT.contiguous().mT if source.dim() > 1 else source
        if target_turned:
            target = target.mT.contiguous().mT if target.dim() > 1 else target
        for into, piece in pieces(target, source, block_bytes):
            assert into.nbytes <= block_bytes
            stager.copy(into, piece)
            assert len(device.queued) <= BLOCKS
        wanted.append(source.to(served, copy=True))
        arrived.append(target)
        source.fill_(7.0)  # it was read when the copies returned
    stager.wait()
    assert not device.queued
    assert all(torch.equal(*pair) for pair in zip(arrived, wanted, strict=True))


def test_both_blocks_are_in_use_before_the_host_waits_for_the_device() -> None:
    device = SlowDevice()
    stager = Stager(blocks(16), device.send)
    target, source = torch.zeros(3, 4), torch.randn(3, 4)
    for row in range(BLOCKS):
        stager.copy(target[row], source[row])
    assert len(device.queued) == BLOCKS
    stager.copy(target[2], source[2])
    assert torch.equal(target[0], source[0]) and not target[1:].any()


@given(shape=SHAPES, block_bytes=st.integers(1, 200))
def test_pieces_are_each_element_once_and_as_few_rows_as_blocks_ask_for(
    shape: tuple[int, ...], block_bytes: int
) -> None:
    target, source = torch.zeros(shape), torch.randn(shape)
    cut = list(pieces(target, source, block_bytes))
    for into, piece in cut:
        assert into.nbytes <= max(block_bytes, 4)
        into += piece
    assert torch.equal(target, source)
    if target.nbytes <= block_bytes:
        assert len(cut) == 1


def _random_map(seed: int) -> WeightMap:
    """Parameters of one to three parts, some larger than a block of the tests, one kept in float32."""
    rng = random.Random(seed)
    specs = []
    for index in range(5):
        columns = rng.choice([(), (rng.randint(1, 40),), (3, rng.randint(1, 9))])
        rows = [rng.randint(1, 30) for _ in range(rng.randint(1, 3))]
        parts = [Part(f"disk.{index}.{part}", (count, 1, *columns)) for part, count in enumerate(rows)]
        specs.append(ParameterSpec(f"p{index}", (sum(rows), *columns), parts, "float32" if index == 2 else None))
    return WeightMap(specs)


@pytest.fixture
def slow_device(monkeypatch: pytest.MonkeyPatch) -> SlowDevice:
    """The loader takes the host's memory for that of a slow CUDA device; blocks are ordinary memory."""
    device = SlowDevice()

    @contextmanager
    def unlocked(size_bytes: int) -> Iterator[Tensor]:
        device.blocks += 1
        try:
            yield torch.full((size_bytes,), 255, dtype=torch.uint8)
        finally:
            assert not device.queued, "a block is given back that the device still reads"
            device.blocks -= 1

    monkeypatch.setattr(staging, "page_locked", unlocked)
    monkeypatch.setattr(staging, "send_to_device", device.send)
    monkeypatch.setattr(loader, "copies", lambda block_bytes, to_cuda: staging.staged_copies(block_bytes))
    return device


@pytest.mark.parametrize("block_bytes", [8, 100, 2**20])
@pytest.mark.parametrize("served", SERVED)
@pytest.mark.parametrize("stored", SERVED)
def test_a_staged_checkpoint_is_the_checkpoint_that_the_host_loads(
    stored: str, served: str, block_bytes: int, tmp_path: Path, slow_device: SlowDevice
) -> None:
    weight_map = _random_map(block_bytes)
    parameters = {spec.name: torch.randn(spec.shape) * 3 for spec in weight_map.parameters}
    write_checkpoint(tmp_path, {}, weight_map, parameters, stored, shards=2)
    told: list[int] = []
    with Checkpoint.open(tmp_path) as checkpoint:
        found = load_parameters(
            checkpoint,
            weight_map,
            weight_map.layout(served).allocate("cpu"),
            served,
            lambda done, total: told.append(done),
            block_bytes,
        )
    assert slow_device.blocks == 0 and not slow_device.queued
    assert slow_device.sent == len(told) and told[-1] == weight_map.parameter_bytes(served)
    for spec in weight_map.parameters:
        on_disk = parameters[spec.name].to(as_torch(spec.dtype or stored))
        assert torch.equal(found[spec.name], on_disk.to(as_torch(spec.dtype or served)))


def test_a_staged_load_that_fails_gives_its_own_error_and_all_blocks_back(
    tmp_path: Path, slow_device: SlowDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_map = _random_map(1)
    parameters = {spec.name: torch.randn(spec.shape) for spec in weight_map.parameters}
    write_checkpoint(tmp_path, {}, weight_map, parameters, "float32")
    last = weight_map.parameters[-1].parts[-1].name
    whole = Checkpoint.tensor

    def broken(self: Checkpoint, name: str, rows: slice | None = None) -> Tensor:
        if name == last:
            raise CheckpointError(f"tensor {name!r} cannot be read")
        return whole(self, name, rows)

    monkeypatch.setattr(Checkpoint, "tensor", broken)
    buffers = weight_map.layout("bfloat16").allocate("cpu")
    with pytest.raises(CheckpointError, match=f"'{last}' cannot be read"):
        load_parameters(Checkpoint.open(tmp_path), weight_map, buffers, "bfloat16", block_bytes=64)
    assert slow_device.sent and slow_device.blocks == 0 and not slow_device.queued


def test_what_the_config_does_not_promise_is_refused_before_a_block_is_made(
    tmp_path: Path, slow_device: SlowDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "page_locked", lambda size: pytest.fail("a block was made"))
    weight_map, other = _random_map(1), _random_map(2)
    parameters = {spec.name: torch.randn(spec.shape) for spec in other.parameters}
    write_checkpoint(tmp_path, {}, other, parameters, "float32")
    with pytest.raises(CheckpointError, match=r"tensor 'disk\.\d\.\d'"):
        load_parameters(Checkpoint.open(tmp_path), weight_map, weight_map.layout("float32").allocate("cpu"), "float32")
    assert not slow_device.sent
