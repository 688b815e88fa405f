"""Whatever a family's own code raises or returns ends in an error that names the family and its function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.checkpoints import make_qwen3
from tests.support.distributions import FAMILIES, install

import trivet

LIMITS = trivet.Limits(max_requests=2, max_step_tokens=16, max_context=64, page_size=4)

SOURCE = """
import torch
from trivet.plugin import ModelFamily, hookimpl
from trivet_qwen3.config import read_geometry
from trivet_qwen3.model import build
from trivet_qwen3.weights import weight_map

{faulty}

class Plugin:
    @hookimpl
    def trivet_model_families(self):
        return [ModelFamily(name="borrowed", model_types=("toy",), read_geometry=read_geometry,
                            weight_map=weight_map, build=build)]

plugin = Plugin()
"""

FAULTS = {
    "read_geometry raises": ("def read_geometry(document): return {}['heads']", "read_geometry: KeyError: 'heads'"),
    "read_geometry exits": ("def read_geometry(document): raise SystemExit(4)", "read_geometry: SystemExit: 4"),
    "read_geometry gives nothing": ("def read_geometry(document): pass", "read_geometry returned None"),
    "weight_map raises": ("def weight_map(geometry): raise ValueError('odd')", "weight_map: ValueError: odd"),
    "weight_map gives a list": ("def weight_map(geometry): return []", r"weight_map returned \[\]"),
    "build raises": ("def build(geometry, parameters): raise TypeError('odd')", "build: TypeError: odd"),
    "build gives nothing": ("def build(geometry, parameters): pass", "profile of its model: TypeError"),
    "the model raises": (
        "def build(geometry, parameters):\n    def model(token_ids, step): raise RuntimeError('odd')\n    return model",
        "profile of its model: RuntimeError: odd",
    ),
}


@pytest.fixture
def checkpoint(site: Path) -> Path:
    directory = site / "checkpoint"
    make_qwen3(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "toy"}))
    return directory


def install_family(site: Path, faulty: str = "") -> None:
    install(site, "toy-dist", {FAMILIES: {"toy": "toy_family:plugin"}}, {"toy_family": SOURCE.format(faulty=faulty)})


def test_a_sound_family_of_another_distribution_is_served(site: Path, checkpoint: Path) -> None:
    install_family(site)
    with trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS) as runtime:
        assert len(runtime.generate([[1, 2]], trivet.Sampling(max_new_tokens=3))[0].token_ids) == 3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_family_names_it_and_its_function(site: Path, checkpoint: Path, fault: str) -> None:
    faulty, text = FAULTS[fault]
    install_family(site, faulty)
    with pytest.raises(trivet.PluginError, match=f"model family 'borrowed'.*{text}"):
        trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS)


def test_a_device_that_runs_out_while_loading_is_no_fault_of_the_family(site: Path, checkpoint: Path) -> None:
    install_family(site, "def build(geometry, parameters): raise torch.OutOfMemoryError('none left')")
    with pytest.raises(trivet.MemoryBudgetError, match="none left") as caught:
        trivet.Runtime.load(checkpoint, device="cpu", limits=LIMITS)
    assert "weights" in str(caught.value) and "KV pages" in str(caught.value)
