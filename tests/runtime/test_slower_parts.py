"""What is served more slowly than it could be on a CUDA device that is here is said once, with what to do."""

from __future__ import annotations

import logging
import tomllib
from importlib import metadata, util
from pathlib import Path
from typing import Any

import attrs
import pytest
from packaging.requirements import Requirement
from tests.support.runtimes import make_checkpoint

import trivet
from trivet.capacity import DeviceProfile
from trivet.cli import environment
from trivet.installed import TESTED_TRITON, untested_triton
from trivet.plugin.manager import PluginManager
from trivet.runtime.blueprint import Blueprint, draw_blueprint
from trivet.runtime.options import SizingOptions

H200 = DeviceProfile.named("h200")
HERE = attrs.evolve(H200, present=True)
NO_TRITON = "Triton is not installed"
NO_FLASHINFER = "flashinfer-python is not installed: pip install '.[cuda]' in a clone of Trivet"


class Machine:
    """What a machine with a CUDA device is supposed to have installed. Nothing is missing unless it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.triton: str | None = None
        self.flashinfer: str | None = None
        self.untested: str | None = None
        for where in ("trivet.capacity.fused", "trivet.attention.flashinfer.paths"):
            monkeypatch.setattr(f"{where}.missing_triton", lambda: self.triton)
        monkeypatch.setattr("trivet.attention.flashinfer.paths.missing_library", lambda: self.flashinfer)
        monkeypatch.setattr("trivet.attention.flashinfer.probe.missing_kernels", lambda *_: None)
        monkeypatch.setattr("trivet.attention.flashinfer.probe.decode_compiles", lambda *_: True)
        monkeypatch.setattr("trivet.runtime.slower.untested_triton", lambda: self.untested)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("dense"), head_dim=64)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3.5", tmp_path_factory.mktemp("hybrid"), head_dim=64)


def said(
    caplog: pytest.LogCaptureFixture, checkpoint: Path, device: DeviceProfile = HERE, **options: Any
) -> tuple[list[str], Blueprint]:
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="trivet"):
        options = {"dtype": "bfloat16", **options}
        blueprint = draw_blueprint(checkpoint, SizingOptions(**options), device, PluginManager.discover())
    return [record.getMessage() for record in caplog.records if record.name.startswith("trivet")], blueprint


def test_nothing_is_said_where_nothing_is_missing(
    machine: Machine, dense: Path, hybrid: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for checkpoint in (dense, hybrid):
        messages, blueprint = said(caplog, checkpoint)
        assert messages == [] and blueprint.capacity.graph_buckets


def test_a_fall_back_to_the_reference_is_said_with_every_reason_and_so_are_graphs_that_are_not_captured(
    machine: Machine, dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.flashinfer = NO_FLASHINFER
    (reference, graphs), blueprint = said(caplog, dense)
    (selection,) = blueprint.selections.values()
    assert selection.path.name == "reference" and not blueprint.capacity.graph_buckets
    assert "reference backend" in reference and reference.count(NO_FLASHINFER) == 1
    assert all(name in reference for name, verdict in selection.verdicts if not verdict.ok)
    assert "launched kernel by kernel" in graphs and "decode path reference" in graphs


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"attention": "reference"}, 0),
        ({"cuda_graphs": False}, 1),
        ({"attention": "reference", "cuda_graphs": False}, 0),
    ],
)
def test_what_was_asked_for_is_not_warned_of(
    options: dict[str, Any], count: int, machine: Machine, dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.flashinfer = NO_FLASHINFER
    messages, _ = said(caplog, dense, **options)
    assert len(messages) == count
    assert all("reference backend" in message for message in messages)


def test_float32_is_one_sentence_and_none_where_it_was_asked_for(
    machine: Machine, dense: Path, hybrid: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for checkpoint in (dense, hybrid):
        (message,), blueprint = said(caplog, checkpoint, dtype=None)
        assert blueprint.capacity.dtype == "float32"
        assert "in float32" in message and "dtype='bfloat16'" in message
        assert said(caplog, checkpoint, dtype="float32")[0] == []


def test_recurrent_layers_on_torch_s_operations_are_said_with_the_reason(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = make_checkpoint("qwen3.5", tmp_path, head_dim=64, linear_value_head_dim=320)
    (message,), blueprint = said(caplog, wide)
    assert not blueprint.capacity.fused_recurrence
    assert message.startswith("recurrent layers run on torch's operations, which are slower") and "320" in message


def test_without_triton_one_sentence_is_for_all_layers(
    machine: Machine, hybrid: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.triton = NO_TRITON
    messages, _ = said(caplog, hybrid)
    assert [message for message in messages if "torch's operations" in message] == [
        f"layers run on torch's operations, which are slower: {NO_TRITON}"
    ]


def test_a_version_of_triton_that_is_not_tested_is_said_where_its_kernels_serve(
    machine: Machine, dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.untested = "Triton 3.7.1 is installed"
    assert said(caplog, dense)[0] == [machine.untested]
    machine.triton = NO_TRITON
    assert machine.untested not in said(caplog, dense)[0]


def test_nothing_is_said_of_a_device_that_is_not_here_nor_on_a_cpu(
    machine: Machine, dense: Path, hybrid: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine.triton, machine.flashinfer, machine.untested = NO_TRITON, NO_FLASHINFER, "Triton 3.7.1"
    for checkpoint in (dense, hybrid):
        for device in (H200, DeviceProfile.named("cpu")):
            assert said(caplog, checkpoint, device)[0] == []
    with caplog.at_level(logging.DEBUG, logger="trivet"), trivet.Runtime.load(dense, device="cpu", autostart=False):
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(("version", "tested"), [("3.6.0", True), ("3.6.2", True), ("3.7.1", False), ("3.60.0", False)])
def test_only_the_tested_triton_passes_for_tested_and_doctor_says_so(
    version: str, tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: object())
    monkeypatch.setattr(metadata, "version", lambda name: version)
    untested = untested_triton()
    assert environment._triton().note == (untested or "")
    if tested:
        assert untested is None
    else:
        assert untested is not None and version in untested and "3.6.x" in untested and "'.[cuda]'" in untested


def test_where_there_is_no_triton_none_is_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    assert untested_triton() is None


def test_the_cuda_extra_holds_triton_to_what_is_tested() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extra = map(Requirement, project["optional-dependencies"]["cuda"])
    (allowed,) = (requirement.specifier for requirement in extra if requirement.name == "triton")
    major, minor, _ = TESTED_TRITON.split(".")
    versions = [f"{major}.{int(minor) + step}.1" for step in (-1, 0, 1)]
    assert [version in allowed for version in versions] == [False, True, False]
