"""The checkpoint reader trusts neither index nor header, and names the file and the tensor at fault."""

import json
import os
import struct
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trivet.errors import CheckpointError
from trivet.weights.checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"


def _save(path: Path, **tensors: torch.Tensor) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def _index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _raw(path: Path, header: Mapping[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> None:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + data)


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_single_file_is_read(tmp_path: Path) -> None:
    weight, bias = torch.randn(3, 2), torch.randn(5).bfloat16()
    file = _save(tmp_path / "model.safetensors", weight=weight, bias=bias)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.names) == {"weight", "bias"}
        assert checkpoint.shape("weight") == (3, 2)
        assert checkpoint.dtype("bias") == "bfloat16"
        assert checkpoint.file("bias") == file
        assert torch.equal(checkpoint.tensor("weight"), weight)
        assert torch.equal(checkpoint.tensor("weight", rows=slice(1, 3)), weight[1:3])
        assert torch.equal(checkpoint.tensor("bias"), bias)


def test_files_without_an_index_are_read_together(tmp_path: Path) -> None:
    first, second = torch.randn(2), torch.randn(3)
    _save(tmp_path / "a.safetensors", first=first)
    _save(tmp_path / "b.safetensors", second=second)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.tensor("second"), second)
        assert torch.equal(checkpoint.tensor("first"), first)


def test_a_tensor_in_two_files_without_an_index_names_both(tmp_path: Path) -> None:
    _save(tmp_path / "a.safetensors", weight=torch.zeros(2))
    _save(tmp_path / "b.safetensors", weight=torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"'weight' lies in both .*a\.safetensors and .*b\.safetensors"):
        Checkpoint.open(tmp_path)


def test_a_tensor_is_read_only_from_the_file_that_the_index_names(tmp_path: Path) -> None:
    right, stale = torch.ones(2), torch.zeros(3)
    _save(tmp_path / "a.safetensors", weight=right)
    _save(tmp_path / "b.safetensors", weight=stale, bias=stale.clone())
    _save(tmp_path / "model.safetensors", weight=stale, left_over=stale.clone())
    _index(tmp_path, {"bias": "b.safetensors", "weight": "a.safetensors"})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.names) == {"weight", "bias"}
        assert checkpoint.shape("weight") == (2,)
        assert torch.equal(checkpoint.tensor("weight"), right)


def test_an_index_may_name_a_folder_within(tmp_path: Path) -> None:
    _save(tmp_path / "shards" / "a.safetensors", weight=torch.ones(2))
    _index(tmp_path, {"weight": "shards/a.safetensors"})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.tensor("weight"), torch.ones(2))


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "shards/../../outside.safetensors",
        "{absolute}",
        "link.safetensors",
        "linked/outside.safetensors",
        "loop.safetensors",
        "..\\outside.safetensors",
        "",
        ".",
        "a\0b",
    ],
)
def test_an_index_that_leaves_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    outside = _save(tmp_path / "outside.safetensors", weight=torch.ones(2))
    directory = tmp_path / "checkpoint"
    (directory / "shards").mkdir(parents=True)
    (directory / "link.safetensors").symlink_to(outside)
    (directory / "linked").symlink_to(tmp_path)
    (directory / "loop.safetensors").symlink_to("loop.safetensors")
    name = name.format(absolute=outside)
    _index(directory, {"weight": name})
    message = "is missing" if name.startswith("loop") else "leaves the checkpoint's directory"
    with pytest.raises(CheckpointError, match=rf"'weight'.*{message}|{message}.*'weight'"):
        Checkpoint.open(directory)


def test_a_snapshot_of_the_hubs_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    _save(tmp_path / "models--a--b" / "blobs" / "abcd", weight=torch.ones(2))
    (snapshot / "a.safetensors").symlink_to("../../blobs/abcd")
    _index(snapshot, {"weight": "a.safetensors"})
    with Checkpoint.open(snapshot) as checkpoint:
        assert torch.equal(checkpoint.tensor("weight"), torch.ones(2))


def test_an_index_in_the_hubs_cache_may_not_name_the_blobs_itself(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    blob = _save(tmp_path / "models--a--b" / "blobs" / "abcd", weight=torch.ones(2))
    for name in ("../../blobs/abcd", str(blob)):
        _index(snapshot, {"weight": name})
        with pytest.raises(CheckpointError, match=r"leaves the checkpoint's directory"):
            Checkpoint.open(snapshot)


def test_a_missing_shard_names_the_file_and_a_tensor(tmp_path: Path) -> None:
    _index(tmp_path, {"weight": "a.safetensors"})
    with pytest.raises(CheckpointError, match=r"a\.safetensors is missing .*'weight'"):
        Checkpoint.open(tmp_path)


def test_a_shard_without_the_tensor_names_both(tmp_path: Path) -> None:
    _save(tmp_path / "a.safetensors", other=torch.ones(2))
    _index(tmp_path, {"weight": "a.safetensors"})
    with pytest.raises(CheckpointError, match=r"a\.safetensors holds no tensor 'weight', which .*index\.json"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        ("{}", "'weight_map' is missing"),
        ('{"weight_map": ["a"]}', "'weight_map' is missing or no object"),
        ('{"weight_map": {"weight": 3}}', "tensor 'weight' is mapped to 3"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, content: str, message: str) -> None:
    _save(tmp_path / "model.safetensors", weight=torch.ones(2))
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=rf"index\.json.*{message}"):
        Checkpoint.open(tmp_path)


def test_a_directory_without_weights_says_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors in .*convert the checkpoint"):
        Checkpoint.open(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent is not a directory"):
        Checkpoint.open(tmp_path / "absent")


F32 = "F32"


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        ({"a": _entry(F32, [3], 0, 8)}, 8, r"tensor 'a': shape \[3\] of F32 takes 12 bytes"),
        ({"a": _entry(F32, [2], 0, 8), "b": _entry(F32, [2], 4, 12)}, 12, "tensor 'b': .*overlaps"),
        ({"a": _entry(F32, [2], 0, 8), "b": _entry(F32, [2], 12, 20)}, 20, "tensor 'b': .*leaves a gap"),
        ({"a": _entry(F32, [2], 0, 8), "b": _entry(F32, [2], 8, 16)}, 12, "tensor 'b': .*ends at byte 16"),
        ({"a": _entry(F32, [2], 0, 8)}, 12, "4 bytes follow the last tensor"),
        ({"a": _entry(F32, [2], 8, 0)}, 8, "tensor 'a': "),
        ({"a": _entry(F32, [-2], 0, 8)}, 8, r"tensor 'a': shape \[-2\]"),
        ({"a": _entry(F32, [2**62, 4], 0, 8)}, 8, "tensor 'a': shape .* takes"),
        ({"a": _entry(F32, [2] * 65, 0, 4)}, 4, "tensor 'a': its shape has 65 dimensions"),
        ({"a": _entry("Q9", [2], 0, 8)}, 8, "tensor 'a': dtype 'Q9' is unknown: expected one of F32"),
        ({"a": {"dtype": F32, "shape": [2]}}, 8, "tensor 'a': data_offsets None"),
        ({"a": [0, 8]}, 8, "tensor 'a': its entry is"),
        (b"[]", 0, "the header is a JSON list"),
        (b"{", 0, "the header is not valid JSON"),
        (b'{"\xff": 1}', 0, "the header is not valid JSON"),
        (b'{"a":' * 90_000, 0, "the header is not valid JSON"),
    ],
)
@pytest.mark.parametrize("indexed", [False, True])
def test_a_lying_header_names_file_and_tensor(
    tmp_path: Path, header: dict[str, Any] | bytes, data_bytes: int, message: str, indexed: bool
) -> None:
    _raw(tmp_path / "model.safetensors", header, bytes(data_bytes))
    if indexed:
        _index(tmp_path, {"a": "model.safetensors"})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {message}"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("length", [2**63, 2**40, 99_000_000, 5])
def test_an_absurd_header_length_is_refused_and_allocates_nothing(tmp_path: Path, length: int) -> None:
    _raw(tmp_path / "model.safetensors", b"{}", b"", length)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: the header claims {length} bytes"):
            Checkpoint.open(tmp_path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20


@pytest.mark.parametrize("kept_bytes", [0, 3, 8, 40])
def test_a_file_truncated_in_its_header_is_named(tmp_path: Path, kept_bytes: int) -> None:
    file = _save(tmp_path / "model.safetensors", weight=torch.ones(64))
    os.truncate(file, kept_bytes)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the (file has|header claims)"):
        Checkpoint.open(tmp_path)


def test_a_file_truncated_in_its_data_names_the_tensor(tmp_path: Path) -> None:
    file = _save(tmp_path / "model.safetensors", weight=torch.ones(64))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'weight': .*truncated"):
        Checkpoint.open(tmp_path)


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing or no regular file"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64, torch.int64])
def test_a_dtype_that_weights_are_not_read_from_names_the_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    _save(tmp_path / "model.safetensors", weight=torch.zeros(4, dtype=dtype), bias=torch.zeros(4))
    with Checkpoint.open(tmp_path) as checkpoint:
        message = r"model\.safetensors: tensor 'weight' is stored as .*: expected one of F32, BF16, F16"
        with pytest.raises(CheckpointError, match=message):
            checkpoint.dtype("weight")
        with pytest.raises(CheckpointError, match=message):
            checkpoint.tensor("weight")
        assert checkpoint.dtype("bias") == "float32"


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    _save(tmp_path / "model.safetensors", weight=torch.ones(2))
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=r"no tensor 'bias'"):
        checkpoint.shape("bias")


def test_a_file_that_changes_after_opening_is_an_error(tmp_path: Path) -> None:
    file = _save(tmp_path / "model.safetensors", weight=torch.ones(2))
    with Checkpoint.open(tmp_path) as checkpoint:
        file.unlink()
        _save(file, weight=torch.ones(3))
        with pytest.raises(CheckpointError, match=r"'weight' has shape .* the file was changed meanwhile"):
            checkpoint.tensor("weight")
        checkpoint.close()
        file.unlink()
        with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'weight' cannot be read"):
            checkpoint.tensor("weight")
