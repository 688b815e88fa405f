# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Products of a few rows with a large weight, bound by the reading of the weight. Deterministic.

Sums are taken in float32, and an output is rounded once. The epilogue adds a bias or the output's old contents, or
applies the gate of a gated MLP. A product whose inner dimension is split over programs is summed by the program that
arrives last, from partial sums that all have written, in the order of the splits: which one is last changes no bit.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trivet.launch import lean
from trivet.ops.fused.table import DeviceTable, MatmulConfig, MatmulShape

MOST_ROWS_WITHOUT_TENSOR_CORES = 4
LEAST_BLOCK_M = 16
"""Fewer rows than a matrix instruction takes are filled up."""

next_power_of_2 = cache(triton.next_power_of_2)
"""Triton's own looks at each call for constants of kernels."""


@triton.jit
def _weight_rows(tile, outputs, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr, GATED: tl.constexpr):
    """Weight rows of a tile, as int64. With a gate, gate and up rows alternate; rows past the end repeat row 0."""
    column = tl.arange(0, BLOCK_N)
    if GATED:
        row = tile * (BLOCK_N // 2) + column // 2
    else:
        row = tile * BLOCK_N + column
    if not EVEN_N:
        row = tl.where(row < outputs, row, 0)
    if GATED:
        row += (column % 2) * outputs
    return row.to(tl.int64)


@triton.jit
def _finish(
    total,
    m,
    tile,
    bias,
    out,
    rows,
    outputs,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Write ``total [BLOCK_M, BLOCK_N]``, whose rows are `m`, through the epilogue."""
    dtype = out.dtype.element_ty
    if GATED:
        gate, up = tl.split(tl.reshape(total, [BLOCK_M, BLOCK_N // 2, 2]))
        # Rounded where the operations one by one round: the projection, the activation, the product.
        gate = gate.to(dtype).to(tl.float32)
        opened = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        total = opened * up.to(dtype).to(tl.float32)
        n = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    place = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    if ACCUMULATE:
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, total.to(dtype), mask=inside)


@triton.jit
def _stretch(row, start, k, inner, EVEN_K: tl.constexpr):
    """Elements ``start + k`` of rows of `inner` elements that begin at `row`; zeros past the end."""
    if EVEN_K:
        values = tl.load(row + start + k)
    else:
        values = tl.load(row + start + k, mask=k < inner - start, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _add_products(sums, w, inputs, start, k, inner, BATCH: tl.constexpr, EVEN_K: tl.constexpr):
    """Element-wise products of a stretch of the weight rows with each input, on top of `sums`."""
    sum0, sum1, sum2, sum3 = sums
    x0, x1, x2, x3 = inputs
    sum0 += w * _stretch(x0, start, k, inner, EVEN_K)
    if BATCH > 1:
        sum1 += w * _stretch(x1, start, k, inner, EVEN_K)
    if BATCH > 2:
        sum2 += w * _stretch(x2, start, k, inner, EVEN_K)
        sum3 += w * _stretch(x3, start, k, inner, EVEN_K)
    return sum0, sum1, sum2, sum3


@lean
@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    inner,
    x_stride,
    out_stride,
    BATCH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Whole weight rows with 1, 2 or 4 (`BATCH`) inputs, of which `rows` are there."""
    tile = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)[None, :]
    weight_at = weight + _weight_rows(tile, outputs, BLOCK_N, EVEN_N, GATED)[:, None] * inner
    # Inputs that are not there repeat the last that is: their products are not written.
    x1 = x + tl.minimum(1, rows - 1).to(tl.int64) * x_stride
    x2 = x + tl.minimum(2, rows - 1).to(tl.int64) * x_stride
    x3 = x + tl.minimum(3, rows - 1).to(tl.int64) * x_stride
    inputs = (x, x1, x2, x3)
    zeros = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sums = (zeros, zeros, zeros, zeros)
    begin = 0
    if DEPENDENT:
        # The weight is there before the kernel that makes the inputs has ended.
        gdc_launch_dependents()
        w = _stretch(weight_at, 0, k, inner, EVEN_K)
        gdc_wait()
        sums = _add_products(sums, w, inputs, 0, k, inner, BATCH, EVEN_K)
        begin = BLOCK_K
    for start in range(begin, inner, BLOCK_K):
        w = _stretch(weight_at, start, k, inner, EVEN_K)
        sums = _add_products(sums, w, inputs, start, k, inner, BATCH, EVEN_K)
    sum0, sum1, sum2, sum3 = sums
    one = tl.arange(0, 1)
    for row in tl.static_range(BATCH):
        if row == 0:
            total = tl.sum(sum0, 1)
        elif row == 1:
            total = tl.sum(sum1, 1)
        elif row == 2:
            total = tl.sum(sum2, 1)
        else:
            total = tl.sum(sum3, 1)
        _finish(
            total[None, :],
            one + row,
            tile,
            bias,
            out,
            rows,
            outputs,
            out_stride,
            1,
            BLOCK_N,
            GATED,
            HAS_BIAS,
            ACCUMULATE,
        )


@lean
@triton.jit(do_not_specialize=["rows"])
def _tiles_kernel(
    x,
    weight,
    bias,
    out,
    partials,
    arrivals,
    rows,
    outputs,
    inner,
    x_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of weight rows, over one of `SPLIT` parts of the inner dimension, with all inputs."""
    tile = tl.program_id(0) // SPLIT
    split = tl.program_id(0) % SPLIT
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    # Inputs that are not there repeat the first: their products are not written.
    x_rows = tl.where(m < rows, m, 0).to(tl.int64) * x_stride
    weight_rows = _weight_rows(tile, outputs, BLOCK_N, EVEN_N, GATED) * inner
    blocks = tl.cdiv(inner, BLOCK_K)
    blocks_per_split = tl.cdiv(blocks, SPLIT)
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, blocks)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if WEIGHTS_FIRST:
        weight_at = weight + weight_rows[:, None] + k[None, :]
        x_at = x + x_rows[None, :] + k[:, None]
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for block in range(first, last):
            start = block * BLOCK_K
            if EVEN_K:
                w = tl.load(weight_at + start)
                inputs = tl.load(x_at + start)
            else:
                w = tl.load(weight_at + start, mask=(k < inner - start)[None, :], other=0.0)
                inputs = tl.load(x_at + start, mask=(k < inner - start)[:, None], other=0.0)
            sums = tl.dot(w, inputs, sums)
        total = tl.trans(sums)
    else:
        weight_at = weight + weight_rows[None, :] + k[:, None]
        x_at = x + x_rows[:, None] + k[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for block in range(first, last):
            start = block * BLOCK_K
            if EVEN_K:
                w = tl.load(weight_at + start)
                inputs = tl.load(x_at + start)
            else:
                w = tl.load(weight_at + start, mask=(k < inner - start)[:, None], other=0.0)
                inputs = tl.load(x_at + start, mask=(k < inner - start)[None, :], other=0.0)
            total = tl.dot(inputs, w, total)
    if SPLIT > 1:
        n = tl.arange(0, BLOCK_N)
        partial = partials + tile.to(tl.int64) * (SPLIT * BLOCK_M * BLOCK_N) + m[:, None] * BLOCK_N + n[None, :]
        there = (m < rows)[:, None] & (n < BLOCK_N)[None, :]
        tl.store(partial + split * (BLOCK_M * BLOCK_N), total, mask=there)
        # All threads have written before one of them announces it; whoever then reads the full count sees all partial
        # sums. They are read past the first-level cache, which other programs' writes do not reach.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            tl.debug_barrier()
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for part in tl.static_range(SPLIT):
                total += tl.load(partial + part * (BLOCK_M * BLOCK_N), mask=there, other=0.0, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
            _finish(
                total,
                m,
                tile,
                bias,
                out,
                rows,
                outputs,
                out_stride,
                BLOCK_M,
                BLOCK_N,
                GATED,
                HAS_BIAS,
                ACCUMULATE,
            )
    else:
        _finish(
            total,
            m,
            tile,
            bias,
            out,
            rows,
            outputs,
            out_stride,
            BLOCK_M,
            BLOCK_N,
            GATED,
            HAS_BIAS,
            ACCUMULATE,
        )


def tiles_of(config: MatmulConfig, weight: Tensor) -> int:
    """How many tiles of weight rows `config` cuts `weight` into: the length of what counts their arrivals."""
    return -(-weight.shape[0] // config.block_n)


def launch_matmul(
    config: MatmulConfig,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    arrivals: Tensor | None = None,
    *,
    accumulate: bool = False,
    gated: bool = False,
    dependent: bool = False,
) -> Tensor:
    """``out = x @ weight.T``, with an epilogue.

    Args:
        config: how; ``"rows"`` takes at most four inputs.
        x: ``[rows, inner]``, the last dimension contiguous.
        weight: ``[outputs, inner]`` contiguous; with `gated`, the gate rows and as many up rows behind them.
        bias: ``[outputs]`` or None; not with `gated`.
        out: ``[rows, outputs]`` (half of the weight's rows with `gated`), the last dimension contiguous.
        arrivals: int32 zeros, `tiles_of` of them at least, which are zeros again afterwards; wanted where
            ``config.split`` is over 1. Two products that may run at once must not share it.
        accumulate: add to what `out` holds.
        gated: ``out = silu(gate) * up`` of the product's two halves.
        dependent: start while the kernel before drains (programmatic dependent launch).

    Returns:
        `out`.
    """
    rows, inner = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    block_n, block_k = config.block_n, config.block_k
    tiles = tiles_of(config, weight)
    even_n, even_k = weight.shape[0] % block_n == 0, inner % block_k == 0
    launch = {"num_warps": config.warps, "launch_pdl": dependent}
    if config.kernel == "rows":
        _rows_kernel[(tiles,)](
            x, weight, bias, out, rows, outputs, inner, x.stride(0), out.stride(0),
            next_power_of_2(rows), block_n, block_k, even_n, even_k, gated,
            bias is not None, accumulate, dependent, **launch,
        )  # fmt: skip
        return out
    block_m = max(LEAST_BLOCK_M, next_power_of_2(rows))
    partials = None
    if config.split > 1:
        # In a captured graph this comes from the graph's own memory, as every temporary does.
        size = tiles * config.split * block_m * block_n
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    _tiles_kernel[(tiles * config.split,)](
        x, weight, bias, out, partials, arrivals, rows, outputs, inner, x.stride(0), out.stride(0),
        block_m, block_n, block_k, config.split, config.weights_first, even_n, even_k, gated,
        bias is not None, accumulate, dependent, num_stages=config.stages, **launch,
    )  # fmt: skip
    return out


class SmallBatchMatmul:
    """Products of up to some number of rows with one weight, by the committed table of the weight's device.

    Holds what split products count their arrivals in, so that weights that work at the same time, in different
    streams, do not share it. One object serves one stream at a time.

    Args:
        weight: ``[outputs, inner]``, contiguous.
        table: of the weight's device.
        gated: the weight's halves are the gate and up rows of a gated MLP, and products are ``silu(gate) * up``.
    """

    def __init__(self, weight: Tensor, table: DeviceTable, *, gated: bool = False) -> None:
        self._weight = weight
        self._gated = gated
        self._outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        self._dependent = table.dependent_launch
        shape = MatmulShape(weight.shape[0], weight.shape[1], str(weight.dtype).removeprefix("torch."), gated)
        self._by_rows = table.by_rows(shape) if weight.is_contiguous() else ()
        counted = [tiles_of(config, weight) for config in self._by_rows if config is not None and config.split > 1]
        self._arrivals = torch.zeros(max(counted), dtype=torch.int32, device=weight.device) if counted else None

    def __bool__(self) -> bool:
        """Whether the table names this weight at all."""
        return bool(self._by_rows)

    def __call__(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor | None:
        """``x @ weight.T`` with what is to be added, or None where the library is the faster: nothing was done then.

        Args:
            x: ``[rows, inner]``.
            bias: ``[outputs]``; not with `gated`.
            residual: ``[rows, outputs]``, added to in place and returned.
        """
        rows = x.shape[0]
        config = self._by_rows[rows] if rows < len(self._by_rows) else None
        if config is None or x.dim() != 2 or x.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
            return None
        out = x.new_empty(rows, self._outputs) if residual is None else residual
        return launch_matmul(
            config,
            x,
            self._weight,
            bias,
            out,
            self._arrivals,
            accumulate=residual is not None,
            gated=self._gated,
            dependent=self._dependent,
        )
