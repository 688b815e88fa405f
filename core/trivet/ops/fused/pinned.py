# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Products for the ``pinned`` policy: an output's bits depend on its row of inputs and on the weight alone.

A weight has one launch configuration, whatever the number of rows. The number of rows is no constant of the kernel and
inputs are brought to one alignment, so that the same machine code serves 1 row and thousands. An output element is
summed in float32 by one program, over the inner dimension from its start to its end in steps of `BLOCK_K`, by matrix
instructions of one shape; rows that fill up a tile are zeros and are not written. Nothing is split, so that nothing is
added in an order of arrival. What is left to differ is the place of a row within its tile and of the tile on the
device, and neither enters a sum.

So a prompt needs no canonical grid of chunks: a token's products do not depend on the rows beside it, its norms, its
activation and its rotation are computed row by row, and under this policy its attention is a row of its own (see
`trivet.attention.flashinfer.split_kv`). Wherever a prompt is cut, each token is computed from the same bits in the
same order.
"""

import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trivet.launch import lean

ALIGNMENT_BYTES = 16
"""What loads of several elements at once need, and what torch allocates at multiples of."""

MANY_OUTPUTS = 16384
"""From here on wide tiles still make about as many programs as a large device has multiprocessors."""


@frozen
class PinnedConfig:
    """How products with one weight are launched, for any number of rows.

    Attributes:
        block_m: rows of a tile: 64 fill a matrix instruction of a warp group.
        block_n: weight rows of a tile.
        block_k: inner elements of a step of the sum.
        warps: warps of a program.
        stages: steps whose loads are in flight. It moves no bit.
        band: tiles of rows that are taken before the next tile of weight rows. It moves no bit.
    """

    block_m: int = 64
    block_n: int = 128
    block_k: int = 64
    warps: int = 4
    stages: int = 4
    band: int = 16


def pinned_config(outputs: int) -> PinnedConfig:
    """The configuration for a weight of `outputs` rows, on every device.

    A compromise that was not tuned: few rows want many programs, which read the weight at once, and thousands of rows
    want wide tiles. Tiles in flight take 96 KiB of shared memory at most, which every device from compute capability
    8.0 on has.
    """
    return PinnedConfig() if outputs >= MANY_OUTPUTS else PinnedConfig(block_n=64, stages=5)


@lean
@triton.jit(do_not_specialize=["rows"])
def _pinned_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    inner,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A tile of outputs. Tiles are taken in bands of `BAND` tiles of rows, so that inputs and weights stay in cache."""
    row_tiles = tl.cdiv(rows, BLOCK_M)
    of_band = BAND * tl.cdiv(outputs, BLOCK_N)
    first_row_tile = tl.program_id(0) // of_band * BAND
    in_band = tl.minimum(row_tiles - first_row_tile, BAND)
    row_tile = first_row_tile + tl.program_id(0) % of_band % in_band
    tile = tl.program_id(0) % of_band // in_band

    m = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    there = (m < rows)[:, None]
    weight_row = n
    if not EVEN_N:  # rows past the end repeat row 0, and their products are not written
        weight_row = tl.where(n < outputs, n, 0)
    x_at = x + m.to(tl.int64)[:, None] * inner + k[None, :]
    weight_at = weight + weight_row.to(tl.int64)[None, :] * inner + k[:, None]
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        if EVEN_K:
            inputs = tl.load(x_at + start, mask=there, other=0.0)
            w = tl.load(weight_at + start)
        else:
            inside = k < inner - start
            inputs = tl.load(x_at + start, mask=there & inside[None, :], other=0.0)
            w = tl.load(weight_at + start, mask=inside[:, None], other=0.0)
        total = tl.dot(inputs, w, total)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    written = there & (n < outputs)[None, :]
    place = out + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    if ACCUMULATE:
        total += tl.load(place, mask=written, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=written)


class PinnedMatmul:
    """Products of any number of rows with one weight, each row as if it were alone.

    Args:
        weight: ``[outputs, inner]``, contiguous.
        dependent: start while the kernel before drains (programmatic dependent launch). It moves no bit.
        config: how the kernel is launched; None: as `pinned_config` says. Another one may give other bits.
    """

    def __init__(self, weight: Tensor, *, dependent: bool = False, config: PinnedConfig | None = None) -> None:
        self._weight = weight
        self._dependent = dependent
        self._outputs, self._inner = weight.shape
        self._config = config or pinned_config(self._outputs)

    def __call__(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """``x @ weight.T`` with what is to be added; the sum is rounded once.

        Args:
            x: ``[rows, inner]``.
            bias: ``[outputs]``.
            residual: ``[rows, outputs]``, the last dimension contiguous; added to in place and returned.
        """
        rows = x.shape[0]
        x = x.contiguous()
        if x.data_ptr() % ALIGNMENT_BYTES:  # rows from the middle of another tensor
            x = x.clone()
        out = x.new_empty(rows, self._outputs) if residual is None else residual
        if rows == 0:
            return out
        config = self._config
        tiles = -(-rows // config.block_m) * -(-self._outputs // config.block_n)
        _pinned_kernel[(tiles,)](
            x, self._weight, bias, out, rows, self._outputs, self._inner, out.stride(0),
            config.block_m, config.block_n, config.block_k, config.band,
            self._outputs % config.block_n == 0, self._inner % config.block_k == 0,
            bias is not None, residual is not None, self._dependent,
            num_warps=config.warps, num_stages=config.stages, launch_pdl=self._dependent,
        )  # fmt: skip
        return out
