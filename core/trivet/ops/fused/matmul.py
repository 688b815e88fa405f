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

LEAST_BLOCK_M = 16
"""Fewer rows than a matrix instruction takes are filled up."""
LEAST_REST_N = 16
"""Of the small block behind a large one, likewise."""

next_power_of_2 = cache(triton.next_power_of_2)
"""Triton's own looks at each call for constants of kernels."""


@triton.jit
def _weight_rows(first, outputs, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr, GATED: tl.constexpr):
    """`BLOCK_N` weight rows from `first` on, as int64.

    With a gate, gate and up rows alternate; rows past the end repeat row 0.
    """
    column = tl.arange(0, BLOCK_N)
    if GATED:
        row = first // 2 + column // 2
    else:
        row = first + column
    if not EVEN_N:
        row = tl.where(row < outputs, row, 0)
    if GATED:
        row += (column % 2) * outputs
    return row.to(tl.int64)


@triton.jit
def _finish(
    total,
    m,
    first,
    bias,
    out,
    rows,
    outputs,
    out_stride,
    BLOCK_M: tl.constexpr,
    FILLED_N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Write ``total [BLOCK_M, :FILLED_N]`` through the epilogue: rows `m`, columns from `first` on."""
    dtype = out.dtype.element_ty
    if GATED:
        gate, up = tl.split(tl.reshape(total, [BLOCK_M, BLOCK_N // 2, 2]))
        # Rounded where the operations one by one round: the projection, the activation, the product.
        gate = gate.to(dtype).to(tl.float32)
        opened = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        total = opened * up.to(dtype).to(tl.float32)
        column, columns = tl.arange(0, BLOCK_N // 2), FILLED_N // 2
        n = first // 2 + column
    else:
        column, columns = tl.arange(0, BLOCK_N), FILLED_N
        n = first + column
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (m < rows)[:, None] & ((column < columns) & (n < outputs))[None, :]
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
    weight_at = weight + _weight_rows(tile * BLOCK_N, outputs, BLOCK_N, EVEN_N, GATED)[:, None] * inner
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
            tile * BLOCK_N,
            bias,
            out,
            rows,
            outputs,
            out_stride,
            1,
            BLOCK_N,
            BLOCK_N,
            GATED,
            HAS_BIAS,
            ACCUMULATE,
        )


@triton.jit
def _prefetch(row, there, elements):
    """Ask for the next `elements` of each weight row into the L2, for which no thread waits."""
    size = elements * row.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.ne.b32 wanted, $2, 0;
        @wanted cp.async.bulk.prefetch.L2.global [$1], $3;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r",
        [row, there.to(tl.int32), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _block(at, inside, there, EVEN_K: tl.constexpr, WHOLE: tl.constexpr):
    """A block of a matrix: `inside` its inner dimension unless that is even, and rows that are `there` unless whole."""
    if EVEN_K and WHOLE:
        return tl.load(at)
    elif EVEN_K:
        return tl.load(at, mask=there, other=0.0)
    elif WHOLE:
        return tl.load(at, mask=inside, other=0.0)
    else:
        return tl.load(at, mask=inside & there, other=0.0)


@lean
@triton.jit(do_not_specialize=["rows", "ahead"])
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
    ahead,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REST_N: tl.constexpr,
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
    """A tile of `TILE_N` weight rows, over one of `SPLIT` parts of the inner dimension, with all inputs.

    Blocks are powers of two: a tile is part of one of `BLOCK_N`, or, with `REST_N`, the whole of it and a part of a
    small one.
    """
    tile = tl.program_id(0) // SPLIT
    split = tl.program_id(0) % SPLIT
    first_row = tile * TILE_N
    filled: tl.constexpr = BLOCK_N if REST_N else TILE_N
    rest: tl.constexpr = TILE_N - filled
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    # Inputs that are not there repeat the first: their products are not written.
    x_rows = tl.where(m < rows, m, 0).to(tl.int64) * x_stride
    weight_rows = _weight_rows(first_row, outputs, BLOCK_N, EVEN_N, GATED) * inner
    there = tl.arange(0, BLOCK_N) < filled
    blocks = tl.cdiv(inner, BLOCK_K)
    blocks_per_split = tl.cdiv(blocks, SPLIT)
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, blocks)
    if DEPENDENT:
        gdc_launch_dependents()
        if EVEN_K:
            # The weight is there before the kernel that makes the inputs has ended.
            ahead = tl.minimum(ahead, inner - first * BLOCK_K)
            _prefetch(weight + weight_rows + first * BLOCK_K, there & (ahead > 0), ahead)
        gdc_wait()
    if WEIGHTS_FIRST:
        weight_at = weight + weight_rows[:, None] + k[None, :]
        x_at = x + x_rows[None, :] + k[:, None]
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for block in range(first, last):
            start = block * BLOCK_K
            w = _block(weight_at + start, k[None, :] < inner - start, there[:, None], EVEN_K, filled == BLOCK_N)
            inputs = _block(x_at + start, k[:, None] < inner - start, None, EVEN_K, True)
            sums = tl.dot(w, inputs, sums)
        total = tl.trans(sums)
    else:
        weight_at = weight + weight_rows[None, :] + k[:, None]
        x_at = x + x_rows[:, None] + k[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if REST_N:
            rest_rows = _weight_rows(first_row + BLOCK_N, outputs, REST_N, EVEN_N, GATED) * inner
            rest_there = tl.arange(0, REST_N) < rest
            rest_at = weight + rest_rows[None, :] + k[:, None]
            rest_total = tl.zeros([BLOCK_M, REST_N], tl.float32)
        for block in range(first, last):
            start = block * BLOCK_K
            w = _block(weight_at + start, k[:, None] < inner - start, there[None, :], EVEN_K, filled == BLOCK_N)
            inputs = _block(x_at + start, k[None, :] < inner - start, None, EVEN_K, True)
            total = tl.dot(inputs, w, total)
            if REST_N:
                w = _block(rest_at + start, k[:, None] < inner - start, rest_there[None, :], EVEN_K, rest == REST_N)
                rest_total = tl.dot(inputs, w, rest_total)
    if SPLIT > 1:
        n = tl.arange(0, BLOCK_N)
        partial = partials + tile.to(tl.int64) * (SPLIT * BLOCK_M * TILE_N) + m[:, None] * TILE_N + n[None, :]
        kept = (m < rows)[:, None] & (n < TILE_N)[None, :]
        tl.store(partial + split * (BLOCK_M * TILE_N), total, mask=kept)
        # All threads have written before one of them announces it; whoever then reads the full count sees all partial
        # sums. They are read past the first-level cache, which other programs' writes do not reach.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            tl.debug_barrier()
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for part in tl.static_range(SPLIT):
                total += tl.load(partial + part * (BLOCK_M * TILE_N), mask=kept, other=0.0, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
            _finish(
                total, m, first_row, bias, out, rows, outputs, out_stride, BLOCK_M, filled, BLOCK_N, GATED, HAS_BIAS,
                ACCUMULATE,
            )  # fmt: skip
    else:
        _finish(
            total, m, first_row, bias, out, rows, outputs, out_stride, BLOCK_M, filled, BLOCK_N, GATED, HAS_BIAS,
            ACCUMULATE,
        )  # fmt: skip
        if REST_N:
            _finish(
                rest_total, m, first_row + BLOCK_N, bias, out, rows, outputs, out_stride, BLOCK_M, rest, REST_N, GATED,
                HAS_BIAS, ACCUMULATE,
            )  # fmt: skip


def blocks_of(config: MatmulConfig) -> tuple[int, int]:
    """Rows of the block, and of the small one behind it if there is one, that hold a tile of ``"tiles"``.

    A little more than a power of two is held by that and a small block, since a block of twice the size takes twice the
    shared memory. Not where the inner dimension is split or the weight is the left operand.
    """
    tile = config.block_n
    whole = next_power_of_2(tile)
    if config.split > 1 or config.weights_first or whole == tile:
        return whole, 0
    rest = max(LEAST_REST_N, next_power_of_2(tile - whole // 2))
    return (whole // 2, rest) if rest <= whole // 8 else (whole, 0)


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
        config: how; ``"rows"`` takes at most `MOST_ROWS_WITHOUT_TENSOR_CORES` inputs (`tables_from` sees to it).
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
    block_m, tile_n = max(LEAST_BLOCK_M, next_power_of_2(rows)), config.block_n
    block_n, rest_n = blocks_of(config)
    partials = None
    if config.split > 1:
        # In a captured graph this comes from the graph's own memory, as every temporary does.
        size = tiles * config.split * block_m * tile_n
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    _tiles_kernel[(tiles * config.split,)](
        x, weight, bias, out, partials, arrivals, rows, outputs, inner, x.stride(0), out.stride(0), config.ahead,
        block_m, tile_n, block_n, rest_n, block_k, config.split, config.weights_first, even_n, even_k, gated,
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
