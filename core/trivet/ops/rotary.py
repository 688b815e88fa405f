"""Rotary position embedding (RoFormer, arXiv 2104.09864) in the rotate-half convention of Hugging Face models.

Entry ``i`` of a head is rotated together with entry ``i + rotary_dim / 2``; entries from `rotary_dim` on pass.

One table per distinct rope is kept, as an owned flat float32 buffer (`trivet.layers.rotary_layout`). Its row for a
position is ``[cosines | sines]``, each ``rotary_dim / 2`` long (also the ``cos_sin_cache`` of FlashInfer). Once
per step `rotary_rows` gathers the rows of that step's positions and widens them to what `apply_rotary_`
multiplies with; every layer uses those.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def fill_rotary_table(
    out: Tensor, inverse_frequencies: npt.NDArray[np.float32] | Tensor, attention_scaling: float
) -> None:
    """Fill a table in place, for as many positions as it has room for, counted from 0.

    Angles are products of float32 positions and float32 frequencies, as in transformers, so that the tables
    agree at long contexts too. Nothing of the table's size is allocated beside it.

    Args:
        out: flat and contiguous, float32, of ``rotary_dim`` elements for each position.
        inverse_frequencies: radians per position, ``[rotary_dim / 2]``.
        attention_scaling: factor on cosines and sines; 1 but for yarn.

    Raises:
        ValueError: `out` is not a whole number of rows.
    """
    frequencies = torch.as_tensor(inverse_frequencies, dtype=torch.float32, device=out.device)
    half = frequencies.numel()
    if out.dim() != 1 or out.numel() % (2 * half):
        raise ValueError(
            f"rotary table: found shape {tuple(out.shape)}, expected one dimension with a multiple of "
            f"{2 * half} elements, as its layout has it"
        )
    rows = out.view(-1, 2, half)
    cosines, sines = rows.unbind(1)
    positions = torch.arange(rows.shape[0], dtype=torch.float32, device=out.device)
    torch.mul(positions[:, None], frequencies, out=cosines)
    torch.sin(cosines, out=sines)
    cosines.cos_()
    if attention_scaling != 1.0:
        out.mul_(attention_scaling)


def rotary_rows(table: Tensor, positions: Tensor, rotary_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `apply_rotary_` multiplies with, for the tokens at `positions`; gathered once per step.

    Args:
        table: as `fill_rotary_table` filled it.
        positions: ``[tokens]``, int32 or int64, each within the table.
        rotary_dim: the table's row length.
        dtype: dtype of the queries and keys; the float32 rows are rounded to it here.

    Returns:
        ``(cos, signed_sin)``, each ``[tokens, 1, rotary_dim]``. Both halves of a row are equal but for the
        sign: the first half of `signed_sin` is negated, because rotate-half subtracts there.
    """
    rows = table.view(-1, rotary_dim).index_select(0, positions).to(dtype).unsqueeze(1)
    cosines, sines = rows.chunk(2, dim=-1)
    return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)


def apply_rotary_(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate the first ``cos.shape[-1]`` entries of every head of `x` in place.

    In place because what passes unrotated then costs nothing, and nothing larger than the rotated part is
    allocated. Query and key heads that lie side by side are rotated in one call.

    Args:
        x: ``[tokens, heads, head_dim]``, any strides without overlap.
        cos, signed_sin: from `rotary_rows`, ``[tokens, 1, rotary_dim]`` or ``[tokens, rotary_dim]``, in the
            dtype of `x`.

    Returns:
        `x` itself.
    """
    if cos.dim() < x.dim():
        cos, signed_sin = cos.unsqueeze(1), signed_sin.unsqueeze(1)
    rotary_dim = cos.shape[-1]
    rotated = x if rotary_dim == x.shape[-1] else x.narrow(-1, 0, rotary_dim)
    partner = rotated.roll(rotary_dim // 2, -1)
    rotated.mul_(cos).addcmul_(partner, signed_sin)
    return x


def apply_rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """`apply_rotary_` on a copy of `x`."""
    return apply_rotary_(x.clone(), cos, signed_sin)
