"""The committed table of matrix products: which kernel was fastest, by device, shape and batch. Free of Triton.

Nothing is timed at start-up. A shape or batch that the table does not name goes to cuBLAS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal

from attrs import field, frozen

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Upper ends of the ranges of rows that are measured and tabled. More rows than the last always go to cuBLAS."""

MOST_ROWS_WITHOUT_TENSOR_CORES = 4
"""That the kernel ``"rows"`` multiplies."""

LIBRARY = "cublas"
"""What the table says where the library is faster."""


@frozen
class MatmulConfig:
    """How one kernel is launched.

    Attributes:
        kernel: ``"rows"``: each program multiplies some whole weight rows with up to four inputs, without tensor cores;
            ``"tiles"``: tensor cores on tiles of weight rows, the inner dimension split over programs.
        block_n: weight rows of a program; a power of two with ``"rows"``, even where they are gated.
        block_k: inner elements taken at once.
        warps: warps of a program.
        stages: depth of the pipeline of loads (``"tiles"`` only).
        split: programs that share a tile's inner dimension (``"tiles"`` only).
        weights_first: the weight tile is the left operand, so that 64 or more of its rows fill a warp group's matrix
            instruction, however few inputs there are (``"tiles"`` only).
        ahead: inner elements of a weight row that are asked for while the kernel before drains (``"tiles"`` only).
    """

    kernel: Literal["rows", "tiles"]
    block_n: int
    block_k: int
    warps: int
    stages: int = 1
    split: int = 1
    weights_first: bool = False
    ahead: int = 0


@frozen
class MatmulShape:
    """What a product is looked up by.

    Attributes:
        outputs, inner: the weight is ``[outputs, inner]``.
        dtype: of inputs and weight, as torch names it.
        gated: the weight holds gate and up rows, and the product ends in ``silu(gate) * up``.
    """

    outputs: int
    inner: int
    dtype: str
    gated: bool = False


@frozen
class DeviceTable:
    """What was measured on one device.

    Attributes:
        shapes: by shape, then by the upper end of the range of rows.
        dependent_launch: launch fused kernels while their predecessor drains (programmatic dependent launch).
    """

    shapes: Mapping[MatmulShape, Mapping[int, MatmulConfig]] = field(factory=dict, hash=False)
    dependent_launch: bool = False

    def by_rows(self, shape: MatmulShape) -> tuple[MatmulConfig | None, ...]:
        """The kernel for each number of rows, from 0 on; None where the library is as fast or nothing was measured.

        Empty if that is so for every number of rows.
        """
        tabled = self.shapes.get(shape)
        if not tabled:
            return ()
        ends = [next(end for end in BATCHES if end >= rows) for rows in range(1, max(tabled) + 1)]
        return (None, *map(tabled.get, ends))


@cache
def committed_tables() -> Mapping[str, DeviceTable]:
    """The tables that ship as data (``matmul.json``), by lower-case device name."""
    return tables_from(resources.files("trivet.ops.fused").joinpath("matmul.json").read_text(encoding="utf-8"))


def tables_from(text: str) -> Mapping[str, DeviceTable]:
    """The tables that a JSON document holds, by lower-case device name.

    Raises:
        ValueError: a kernel is to take more rows than it multiplies.
    """
    tables: dict[str, DeviceTable] = {}
    for entry in json.loads(text).values():
        tables.update(dict.fromkeys(entry["names"], _device(entry)))
    return tables


def _device(entry: Mapping[str, Any]) -> DeviceTable:
    shapes = {}
    for values in entry["shapes"]:
        shape = MatmulShape(values["outputs"], values["inner"], values["dtype"], values["gated"])
        batches = {int(end): config for end, config in values["batches"].items() if config != LIBRARY}
        shapes[shape] = {end: MatmulConfig(**config) for end, config in batches.items()}
        for end, config in shapes[shape].items():
            if config.kernel == "rows" and end > MOST_ROWS_WITHOUT_TENSOR_CORES:
                raise ValueError(
                    f"{shape}: the table gives up to {end} rows to the kernel 'rows', which multiplies at most "
                    f"{MOST_ROWS_WITHOUT_TENSOR_CORES}: tune_matmul chooses among kernels that take as many"
                )
    return DeviceTable(shapes, entry["dependent_launch"])
