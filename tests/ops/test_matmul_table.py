"""The committed table of matrix products says what can be launched."""

import json
import math
from importlib import resources
from pathlib import Path

import pytest

from trivet.ops.fused.table import (
    BATCHES,
    LIBRARY,
    DeviceTable,
    MatmulConfig,
    MatmulShape,
    committed_tables,
    tables_from,
)

SHAPE = MatmulShape(64, 128, "bfloat16")
ROOT = Path(__file__).parents[2]
WORTH = 0.985
"""A kernel is chosen where it takes at most this share of the library's time."""


def test_every_choice_is_the_fastest_of_the_run_that_last_measured_it() -> None:
    committed = json.loads(resources.files("trivet.ops.fused").joinpath("matmul.json").read_text())
    for device in committed.values():
        runs = json.loads((ROOT / device["evidence"]).read_text())["runs"]
        measured = {}
        for figure in (figure for run in runs for figure in run["figures"]):
            product = figure["product"]
            measured[product["outputs"], product["inner"], product["gated"], figure["rows"]] = figure
        for shape in device["shapes"]:
            for rows, chosen in shape["batches"].items():
                where = (shape["outputs"], shape["inner"], shape["gated"], int(rows))
                figure = measured[where]
                timed = [candidate for candidate in figure["candidates"] if "us" in candidate]
                best = min(timed, key=lambda candidate: candidate["us"], default=None)
                worth = best is not None and best["us"] <= WORTH * figure["library_us"]
                fastest = MatmulConfig(**best["config"]) if best is not None and worth else LIBRARY
                assert (chosen if chosen == LIBRARY else MatmulConfig(**chosen)) == fastest, where


def test_every_committed_kernel_can_be_launched() -> None:
    tables = committed_tables()
    assert all(name == name.lower() for name in tables)
    for table in tables.values():
        for shape, batches in table.shapes.items():
            for rows, config in batches.items():
                where = (shape, rows, config)
                assert rows in BATCHES, where
                assert shape.dtype in ("bfloat16", "float16"), where
                assert config.kernel in ("rows", "tiles"), where
                powers = (config.block_k, config.warps, *([config.block_n] if config.kernel == "rows" else []))
                assert all(size > 0 and math.log2(size).is_integer() for size in powers) and config.split > 0, where
                assert not (shape.gated and config.block_n % 2), where
                if config.kernel == "rows":
                    assert rows <= 4 and config.split == 1, where
                else:  # what a matrix instruction takes
                    block_n = 1 << (config.block_n - 1).bit_length()
                    assert config.block_k >= 16 and block_n >= (64 if config.weights_first else 16), where


def test_rows_go_to_the_kernel_of_the_smallest_batch_that_holds_them() -> None:
    one, many = MatmulConfig("rows", 2, 1024, 4), MatmulConfig("tiles", 64, 128, 4)
    by_rows = DeviceTable({SHAPE: {1: one, 16: many}}).by_rows(SHAPE)
    assert [by_rows.index(one), by_rows.count(one)] == [1, 1]
    assert [rows for rows, config in enumerate(by_rows) if config is many] == list(range(9, 17))
    assert len(by_rows) == 17


def test_a_shape_that_was_not_measured_has_no_kernels() -> None:
    assert DeviceTable().by_rows(SHAPE) == ()
    assert DeviceTable({SHAPE: {}}).by_rows(SHAPE) == ()


def test_more_rows_than_a_kernel_multiplies_are_refused() -> None:
    kernel = {"kernel": "rows", "block_n": 2, "block_k": 64, "warps": 4}
    shape = {"outputs": 64, "inner": 128, "dtype": "bfloat16", "gated": False, "batches": {"4": kernel, "8": kernel}}
    document = {"some": {"names": ["some device"], "dependent_launch": True, "shapes": [shape]}}
    with pytest.raises(ValueError, match="up to 8 rows to the kernel 'rows', which multiplies at most 4"):
        tables_from(json.dumps(document))


def test_where_the_library_was_faster_the_document_says_so() -> None:
    document = """{"some": {"names": ["some device"], "dependent_launch": true, "shapes": [{"outputs": 64, "inner": 128,
        "dtype": "bfloat16", "gated": false, "batches": {"1": "cublas", "2": {"kernel": "rows", "block_n": 2,
        "block_k": 64, "warps": 4}}}]}}"""
    table = tables_from(document)["some device"]
    assert table.dependent_launch
    assert table.by_rows(SHAPE) == (None, None, MatmulConfig("rows", 2, 64, 4))
