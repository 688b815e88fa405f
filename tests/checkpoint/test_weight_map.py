"""A weight map is the one source of parameter sizes, and the loader fills exactly what it states."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trivet.dtypes import SERVED, as_torch
from trivet.errors import CapacityExceeded, CheckpointError, ConfigError, PluginError
from trivet.weights import checkpoint as checkpoint_module
from trivet.weights.checkpoint import Checkpoint
from trivet.weights.loader import check, load_parameters, parameter_views
from trivet.weights.map import Initial, ParameterSpec, Part, WeightMap
from trivet.weights.save import write_checkpoint

FUSED = WeightMap(
    (
        ParameterSpec("qkv", (7, 4), (Part("q", (4, 4)), Part("k", (2, 4)), Part("v", (1, 4)))),
        ParameterSpec("conv", (6, 3), (Part("conv1d.weight", (6, 1, 3)),)),
        ParameterSpec("decay", (5,), (Part("A_log", (5,)),), dtype="float32"),
    ),
    ignored=("vision.*", "lm_head.weight"),
)
DISK: dict[str, tuple[int, ...]] = {part.name: part.shape for parameter in FUSED.parameters for part in parameter.parts}


def _disk(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, shape in DISK.items()}


def _load(
    directory: Path, weight_map: WeightMap, dtype: str, progress: Any = None, **settings: int
) -> dict[str, torch.Tensor]:
    buffers = weight_map.layout(dtype).allocate("cpu")
    with Checkpoint.open(directory) as checkpoint:
        return load_parameters(checkpoint, weight_map, buffers, dtype, progress, **settings)


@pytest.mark.parametrize(
    ("shape", "parts", "message"),
    [
        ((4, 3), (Part("a", (2, 3)), Part("b", (1, 3))), r"\['a', 'b'\] fill 3 rows: expected 4"),
        ((4, 3), (Part("a", (4, 4)),), "'a' of shape .* is no whole number of rows"),
        ((4, 0), (Part("a", (4, 0)),), "every dimension to be at least 1"),
        ((4,), (Part("a", (-4,)),), "every dimension to be at least 1"),
        ((), (Part("a", ()),), "at least one dimension and one part"),
        ((4,), (), "at least one dimension and one part"),
    ],
)
def test_parts_that_do_not_fill_a_parameter_are_refused(
    shape: tuple[int, ...], parts: tuple[Part, ...], message: str
) -> None:
    with pytest.raises(PluginError, match=message):
        ParameterSpec("weight", shape, parts)


def test_a_parameter_is_kept_only_in_a_served_dtype() -> None:
    with pytest.raises(PluginError, match=r"'weight' is kept in 'int8'"):
        ParameterSpec("weight", (2,), (Part("a", (2,)),), dtype="int8")


@pytest.mark.parametrize(
    ("parameters", "ignored", "message"),
    [
        ((("w", "a"), ("w", "b")), (), "two parameters are called 'w'"),
        ((("w", "a"), ("x", "a")), (), "'a' fills both 'w' and 'x'"),
        ((("w", "mtp.a"),), ("mtp.*",), "'mtp.a' fills 'w' and matches"),
    ],
)
def test_a_map_that_contradicts_itself_is_refused(
    parameters: tuple[tuple[str, str], ...], ignored: tuple[str, ...], message: str
) -> None:
    specs = tuple(ParameterSpec(name, (2,), (Part(disk, (2,)),)) for name, disk in parameters)
    with pytest.raises(PluginError, match=message):
        WeightMap(specs, ignored)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Initial.normal(-1.0),
        lambda: Initial.uniform(1.0, 0.0),
        lambda: Initial.log_uniform(0.0, 1.0),
        lambda: Initial.near(float("nan"), 0.1),
    ],
)
def test_a_draw_that_cannot_be_made_is_refused(make: Any) -> None:
    with pytest.raises(PluginError, match=r"expected"):
        make()


@pytest.mark.parametrize("dtype", SERVED)
def test_reserved_bytes_are_allocated_bytes(dtype: str) -> None:
    buffers = FUSED.layout(dtype).allocate("cpu")
    views = parameter_views(FUSED, buffers)
    assert FUSED.parameter_bytes(dtype) == buffers.storage_bytes == sum(view.nbytes for view in views.values())
    assert {name: tuple(view.shape) for name, view in views.items()} == {
        spec.name: spec.shape for spec in FUSED.parameters
    }
    assert views["decay"].dtype == torch.float32
    assert views["qkv"].dtype == as_torch(dtype)


def test_a_map_past_int64_is_refused_before_anything_is_allocated() -> None:
    huge = 2**40
    spec = ParameterSpec("weight", (huge, huge), (Part("a", (huge, huge)),))
    with pytest.raises(CapacityExceeded, match=r"weight"):
        WeightMap((spec,)).layout("float32")


@pytest.mark.parametrize("dtype", SERVED)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_fill_their_rows_in_the_served_dtype(tmp_path: Path, dtype: str, stored: torch.dtype) -> None:
    disk = _disk(stored)
    save_file(disk, tmp_path / "model.safetensors")
    found = _load(tmp_path, FUSED, dtype)
    served = as_torch(dtype)
    assert torch.equal(found["qkv"], torch.cat([disk["q"], disk["k"], disk["v"]]).to(served))
    assert torch.equal(found["conv"], disk["conv1d.weight"].squeeze(1).to(served))
    assert torch.equal(found["decay"], disk["A_log"].float())


def test_parameters_are_views_of_the_buffers_and_no_file_stays_mapped(tmp_path: Path) -> None:
    save_file(_disk(), tmp_path / "model.safetensors")
    buffers = FUSED.layout("float32").allocate("cpu")
    with Checkpoint.open(tmp_path) as checkpoint:
        found = load_parameters(checkpoint, FUSED, buffers, "float32")
        assert {name: view.data_ptr() for name, view in found.items()} == buffers.pointers()
        assert _mapped_files(tmp_path) == 0


def test_one_file_is_mapped_at_a_time(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, FUSED, _random_parameters(FUSED), "float32", shards=3)
    mapped: list[int] = []
    _load(tmp_path, FUSED, "float32", lambda done, total: mapped.append(_mapped_files(tmp_path)))
    assert mapped and max(mapped) <= 1


def test_each_file_is_opened_once_however_its_tensors_are_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = _disk()
    even, odd = dict(list(disk.items())[::2]), dict(list(disk.items())[1::2])
    save_file(even, tmp_path / "a.safetensors")
    save_file(odd, tmp_path / "b.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        opened: list[Path] = []

        def counting(file: Path, framework: str) -> Any:
            opened.append(file)
            return safe_open(file, framework)

        monkeypatch.setattr(checkpoint_module, "safe_open", counting)
        buffers = FUSED.layout("float32").allocate("cpu")
        found = load_parameters(checkpoint, FUSED, buffers, "float32")
    assert [file.name for file in opened] == ["a.safetensors", "b.safetensors"]
    assert torch.equal(found["qkv"], torch.cat([disk["q"], disk["k"], disk["v"]]))


def _mapped_files(directory: Path) -> int:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc/self/maps to see what is mapped")
    return len({line.split()[-1] for line in maps.read_text().splitlines() if str(directory) in line})


def test_a_load_that_is_broken_off_leaves_no_file_mapped(tmp_path: Path) -> None:
    save_file(_disk(), tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)

    def interrupted(done: int, total: int) -> None:
        assert _mapped_files(tmp_path) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_parameters(checkpoint, FUSED, FUSED.layout("float32").allocate("cpu"), "float32", interrupted)
    gc.collect()
    assert _mapped_files(tmp_path) == 0


@pytest.mark.parametrize("block_bytes", [1, 40, 2**20])
def test_progress_counts_up_to_the_bytes_of_the_layout(tmp_path: Path, block_bytes: int) -> None:
    disk = _disk()
    save_file(disk, tmp_path / "model.safetensors")
    seen: list[tuple[int, int]] = []
    found = _load(tmp_path, FUSED, "bfloat16", lambda done, total: seen.append((done, total)), block_bytes=block_bytes)
    done = [entry[0] for entry in seen]
    assert done == sorted(set(done))
    assert done[-1] == FUSED.parameter_bytes("bfloat16")
    assert {entry[1] for entry in seen} == {FUSED.parameter_bytes("bfloat16")}
    assert torch.equal(found["qkv"], torch.cat([disk["q"], disk["k"], disk["v"]]).bfloat16())


def test_ignored_tensors_are_ignored_whatever_they_hold(tmp_path: Path) -> None:
    extra = {"vision.blocks.0.weight": torch.zeros(3, dtype=torch.int8), "lm_head.weight": torch.zeros(9)}
    save_file(_disk() | extra, tmp_path / "model.safetensors")
    check(Checkpoint.open(tmp_path), FUSED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": None}, "holds no tensor 'k' in any file that is read: expected it, of shape .2, 4., for"),
        ({"k": torch.zeros(4, 2)}, r"model\.safetensors: tensor 'k' has shape \[4, 2\]: expected \[2, 4\]"),
        ({"conv1d.weight": torch.zeros(6, 3)}, r"tensor 'conv1d.weight' has shape \[6, 3\]: expected \[6, 1"),
        ({"A_log": torch.zeros(())}, r"tensor 'A_log' has shape \[\]: expected \[5\]"),
        ({"k": torch.zeros(2, 4, dtype=torch.int8)}, "tensor 'k' is stored as I8: expected one of F32"),
        ({"k.scale": torch.zeros(2)}, r"model\.safetensors: tensor 'k.scale' is not part of this model"),
        ({"x": torch.zeros(2), "y": torch.zeros(2)}, r"tensor '[xy]' is not part .* \(and 1 more\)"),
    ],
)
def test_what_the_config_does_not_promise_is_named_before_anything_is_read(
    tmp_path: Path,
    change: dict[str, torch.Tensor | None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Checkpoint, "tensor", lambda *_: pytest.fail("data was read"))
    tensors = {name: tensor for name, tensor in (_disk() | change).items() if tensor is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        check(checkpoint, FUSED)
    with pytest.raises(CheckpointError, match=message):
        load_parameters(checkpoint, FUSED, FUSED.layout("float32").allocate("cpu"), "float32")


def test_buffers_of_another_dtype_are_refused(tmp_path: Path) -> None:
    save_file(_disk(), tmp_path / "model.safetensors")
    buffers = FUSED.layout("float32").allocate("cpu")
    with pytest.raises(PluginError, match=r"'qkv' is float32: expected bfloat16"):
        load_parameters(Checkpoint.open(tmp_path), FUSED, buffers, "bfloat16")


def _random_parameters(weight_map: WeightMap) -> dict[str, torch.Tensor]:
    return {spec.name: torch.randn(spec.shape) for spec in weight_map.parameters}


@st.composite
def _maps(draw: st.DrawFn) -> WeightMap:
    sizes = st.integers(1, 4)
    specs = []
    for index in range(draw(st.integers(1, 4))):
        columns = tuple(draw(st.lists(sizes, max_size=2)))
        rows = draw(st.lists(sizes, min_size=1, max_size=3))
        squeezed = draw(st.booleans())
        parts = tuple(
            Part(f"disk.{index}.{part}", (count, 1, *columns) if squeezed else (count, *columns))
            for part, count in enumerate(rows)
        )
        dtype = draw(st.sampled_from([None, "float32"]))
        specs.append(ParameterSpec(f"parameter.{index}", (sum(rows), *columns), parts, dtype))
    return WeightMap(tuple(specs))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(weight_map=_maps(), dtype=st.sampled_from(SERVED), data=st.data())
def test_what_is_written_is_what_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, weight_map: WeightMap, dtype: str, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    tensors = sum(len(spec.parts) for spec in weight_map.parameters)
    shards = data.draw(st.integers(1, tensors))
    parameters = _random_parameters(weight_map)
    write_checkpoint(directory, {"model_type": "x"}, weight_map, parameters, dtype, shards)
    found = _load(directory, weight_map, dtype)
    for spec in weight_map.parameters:
        assert torch.equal(found[spec.name], parameters[spec.name].to(as_torch(spec.dtype or dtype)))
    assert len(list(directory.glob("*.safetensors"))) == shards
    assert json.loads((directory / "config.json").read_text()) == {"model_type": "x"}


def test_a_written_checkpoint_holds_the_tensors_as_they_are_called_on_disk(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, FUSED, _random_parameters(FUSED), "bfloat16")
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == DISK
    assert stored["A_log"].dtype == torch.float32
    assert stored["q"].dtype == torch.bfloat16


@pytest.mark.parametrize("shards", [0, 6])
def test_more_shards_than_tensors_are_refused(tmp_path: Path, shards: int) -> None:
    with pytest.raises(ConfigError, match=f"{shards} shards for 5 tensors"):
        write_checkpoint(tmp_path, {}, FUSED, _random_parameters(FUSED), "float32", shards)
