"""Every kernel configuration that the committed table of the device serves is right at the shape that it serves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trivet.ops.fused.table import DeviceTable, MatmulConfig, MatmulShape, committed_tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF_STEP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
WEIGHT_ROWS = 2048
"""Rows of a weight that are compared at once: in float64, whole weights would take gigabytes."""
MOST_WEIGHT_BYTES = 1_500_000_000
"""Weights beyond, those of output projections, take the kernels of smaller ones and much of the device."""

SERVED = [
    (shape, config)
    for shape, by_end in committed_tables()["h200"].shapes.items()
    for config in dict.fromkeys(by_end.values())
]


def named(value: object) -> str:
    if isinstance(value, MatmulShape):
        return f"{value.outputs}x{value.inner}{'-gated' if value.gated else ''}"
    assert isinstance(value, MatmulConfig)
    numbers = (value.warps, value.stages, value.split, value.ahead)
    turned = "-weights-first" if value.weights_first else ""
    return f"{value.kernel}-{value.block_n}x{value.block_k}-{'-'.join(map(str, numbers))}{turned}"


@pytest.mark.skipif(DEVICE == "cpu", reason="the shapes are those of a device's table")
@pytest.mark.parametrize(("shape", "config"), SERVED, ids=named)
def test_a_committed_configuration_equals_float64_at_both_ends_of_its_rows(
    shape: MatmulShape, config: MatmulConfig
) -> None:
    from trivet.ops.fused.device import device_table

    table = device_table(torch.device(DEVICE))
    if config not in table.shapes.get(shape, {}).values():
        pytest.skip(f"the table of {torch.cuda.get_device_name()} has no such entry")
    if shape.outputs * shape.inner * getattr(torch, shape.dtype).itemsize > MOST_WEIGHT_BYTES:
        pytest.skip(f"the weight takes more than {MOST_WEIGHT_BYTES / 1e9} GB")
    check_configuration(table, shape, config)


def check_configuration(table: DeviceTable, shape: MatmulShape, config: MatmulConfig) -> None:
    """Products of the fewest and the most rows that `table` has `config` serve, twice each."""
    from trivet.ops.fused.matmul import SmallBatchMatmul

    by_rows = table.by_rows(shape)
    served = [rows for rows, other in enumerate(by_rows) if other == config]
    generator, dtype = torch.Generator(DEVICE).manual_seed(shape.outputs + shape.inner), getattr(torch, shape.dtype)

    def drawn(*size: int, scale: float = 1.0) -> Tensor:
        return torch.empty(size, dtype=dtype, device=DEVICE).normal_(std=scale, generator=generator)

    weight = drawn(shape.outputs, shape.inner, scale=shape.inner**-0.5)
    x = drawn(served[-1], shape.inner)
    # As layers ask for them: what narrows is added to the residual stream.
    before = drawn(served[-1], shape.outputs) if not shape.gated and shape.outputs <= shape.inner else None
    expected, slack = float64_products(x, weight)
    steps = HALF_STEP[shape.dtype]
    if shape.gated:
        gate, up = expected.chunk(2, -1)
        # Gate, activation and product are rounded one after the other.
        expected, slack, steps = torch.nn.functional.silu(gate) * up, slack.chunk(2, -1)[0] + 1e-3, 5 * steps
    elif before is not None:
        expected = expected + before.double()
    product = SmallBatchMatmul(weight, table, gated=shape.gated)
    for rows in sorted({served[0], served[-1]}):
        outs = [product(x[:rows], residual=None if before is None else before[:rows].clone()) for _ in range(2)]
        assert outs[0] is not None and outs[1] is not None
        assert torch.equal(outs[0], outs[1]), f"two products of {rows} rows differ"
        error = (outs[0].double() - expected[:rows]).abs()
        assert (error <= steps * expected[:rows].abs() + slack[:rows]).all(), (rows, float(error.max()))
        assert product._arrivals is None or not product._arrivals.any(), "a count of arrivals was left"


def float64_products(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``x @ weight.T``, and what sums in float32 may be apart from it."""
    wide, products, sizes = x.double(), [], []
    for block in weight.split(WEIGHT_ROWS):
        block = block.double()
        products.append(wide @ block.T)
        sizes.append(wide.abs() @ block.abs_().T)
    return torch.cat(products, -1), 1e-5 * torch.cat(sizes, -1)
