"""The instruments of the kit see what they are there to see."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch

from trivet.capacity import Limits, PlanCapacity, TileShape
from trivet.config.rope import Rope
from trivet.conformance.batches import batch_of, worst_lengths
from trivet.conformance.coupling import violations
from trivet.conformance.settings import UNTOLD, settings
from trivet.conformance.storages import NewStorages, storages_within
from trivet.conformance.tolerances import MOST_MULTIPLE, bound_of, tolerances
from trivet.geometry import AttentionGeometry


@pytest.mark.parametrize(
    "line",
    [
        "import trivet.runtime.engine",
        "from trivet.layers.norm import RmsNorm",
        "from trivet import runtime",
        "from trivet.plugin import family",
        "from trivet.plugin.layers import _private",
        "from trivet.conformance.bench import Bench",
        "import importlib; importlib.import_module('trivet.scheduler')",
        "import trivet; trivet.scheduler.Scheduler",
    ],
)
def test_what_is_private_is_found_with_file_and_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(f"import os\n{line}\n")
    (found,) = violations([file])
    assert found.startswith(f"{tmp_path.name}/model.py:2: ")


@pytest.mark.parametrize(
    "line",
    [
        "import trivet",
        "from trivet import Limits, plugin",
        "from trivet.plugin import ModelFamily, standard_weights",
        "from trivet.plugin import layers",
        "from trivet.plugin.layers import Attention",
        "from trivet.conformance import FamilyConformance",
        "import trivet_other.runtime",
        "from . import model",
        "import trivet; trivet.Runtime",
    ],
)
def test_what_is_public_is_no_violation(line: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(f"{line}\n")
    assert violations([tmp_path / "model.py"]) == []


class Holder:
    def __init__(self) -> None:
        self.buffer = torch.zeros(4, dtype=torch.int32)
        self.more = {"staging": [torch.zeros(4, dtype=torch.int32)]}


def test_new_storages_are_seen_however_they_are_made_and_old_ones_are_not() -> None:
    import numpy as np

    holder = Holder()
    values = np.arange(4, dtype=np.int32)

    def seen(act: object) -> int:
        watch = NewStorages(storages_within(holder))
        with watch:
            act()  # type: ignore[operator]
        return len(watch.found)

    assert seen(lambda: holder.buffer.copy_(torch.from_numpy(values))) == 0
    assert seen(lambda: holder.more["staging"][0][:2].copy_(holder.buffer[:2])) == 0
    assert seen(lambda: holder.buffer.copy_(torch.from_numpy(values).clone())) > 0
    assert seen(lambda: holder.buffer.copy_(torch.tensor([1, 2, 3, 4]))) > 0
    assert seen(lambda: torch.zeros(3)) > 0


def test_every_setting_that_a_family_is_to_leave_alone_is_one_of_torch() -> None:
    assert UNTOLD not in settings().values()


def test_worst_batches_need_all_of_every_dimension() -> None:
    attention = AttentionGeometry(4, 2, 16, Rope(1e4, 16))
    for limits in (Limits(3, 40, 50, 4), Limits(5, 2, 9, 3), Limits(1, 300, 7, 16), Limits(4, 130, 64, 1)):
        capacity = PlanCapacity(attention, limits, TileShape(8, 16))
        batches = [batch_of(capacity, *lengths) for lengths in worst_lengths(capacity)]
        tiles = [int((-(-b.query_lengths // 8) * -(-b.kv_lengths // 16)).sum()) for b in batches]
        assert max(tiles) == capacity.tiles
        assert max(batch.tokens for batch in batches) == capacity.tokens
        assert all(len(batch.page_indices) == capacity.pages for batch in batches)


def test_the_tolerances_are_as_they_were_measured() -> None:
    assert [fault for entry in tolerances() for fault in entry.faults()] == []
    assert bound_of("logprob-max", "cpu", "float32", "nobody/plain") == bound_of("logprob-max", "cpu", "float32")
    with pytest.raises(LookupError):
        bound_of("logprob-max", "tpu", "float32")


@pytest.mark.parametrize("change", [{"multiple": 9.0}, {"samples": (1.0, 1.0, 1.0)}, {"dtype": "float16"}])
def test_loosening_a_bound_without_measuring_again_is_a_fault(change: dict[str, object]) -> None:
    entry = tolerances()[0]
    assert any("changed by hand" in fault for fault in attrs.evolve(entry, **change).faults())


def test_no_multiple_is_so_large_that_it_says_nothing() -> None:
    entry = attrs.evolve(tolerances()[0], multiple=2 * MOST_MULTIPLE)
    assert any("multiple" in fault for fault in attrs.evolve(entry, digest=entry.own_digest).faults())
