"""Random numbers keyed by (seed, position, token id), from integer arithmetic alone.

A draw takes the token of the largest ``probability / noise``, the noise being exponential: the Gumbel-max
trick (Maddison et al. 2014, arXiv:1411.0030) with the logarithm taken off. Since a token's noise depends on
nothing but its key, a row draws the same token alone, beside others, in any place and after a restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def _signed(value: int, bits: int) -> int:
    return value - 2**bits if value >= 2 ** (bits - 1) else value


# Of splitmix64 (Steele et al. 2014, doi:10.1145/2660193.2660195) and of MurmurHash3's 32-bit finaliser.
_GOLDEN_64 = _signed(0x9E3779B97F4A7C15, 64)
_MIX_64 = (_signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64))
_GOLDEN_32 = _signed(0x9E3779B9, 32)
_MIX_32 = (_signed(0x85EBCA6B, 32), _signed(0xC2B2AE35, 32))


def token_hashes(vocabulary: int, device: torch.device | str) -> Tensor:
    """A well-mixed int32 for every token id, [vocabulary]; computed once, the same for every draw."""
    hashes = torch.arange(1, vocabulary + 1, dtype=torch.int64, device=device)
    hashes = _narrowed(hashes.mul_(_GOLDEN_32))
    scratch = torch.empty_like(hashes)
    _fold(hashes, 16, scratch).mul_(_MIX_32[0])
    _fold(hashes, 13, scratch).mul_(_MIX_32[1])
    return _fold(hashes, 16, scratch)


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys of each row, [rows], from its seed and its position, int64 [rows]."""
    mixed = _splitmix(_splitmix(seeds + _GOLDEN_64) + positions * _GOLDEN_64)
    return _narrowed(mixed), (mixed >> 32).to(torch.int32)


def exponential_noise(hashes: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
    """Exponential variates of rate 1, float32 [rows, tokens], within (0, 16.7).

    Args:
        hashes: int32 [tokens] or [rows, tokens], the tokens' entries of `token_hashes`.
        keys: of `row_keys`, each [rows].
    """
    first, second = (key.unsqueeze(-1) for key in keys)
    bits = hashes ^ first
    scratch = torch.empty_like(bits)
    _fold(bits, 16, scratch).mul_(_MIX_32[0]).bitwise_xor_(second)
    _fold(bits, 13, scratch).mul_(_MIX_32[1])
    _fold(bits, 16, scratch)
    # 31 bits, so that small noise, which lets improbable tokens win, keeps its whole resolution in float32.
    uniform = bits.bitwise_and_(2**31 - 1).to(torch.float32).mul_(2.0**-31).add_(2.0**-32)
    return uniform.clamp_(max=_LARGEST_BELOW_ONE).neg_().log1p_().neg_()


def _fold(bits: Tensor, shift: int, scratch: Tensor) -> Tensor:
    """``bits ^= bits >>> shift`` on int32, in place; torch shifts arithmetically, hence the mask."""
    torch.bitwise_right_shift(bits, shift, out=scratch)
    return bits.bitwise_xor_(scratch.bitwise_and_(2 ** (32 - shift) - 1))


def _splitmix(bits: Tensor) -> Tensor:
    bits = bits ^ ((bits >> 30) & (2**34 - 1))
    bits = bits * _MIX_64[0]
    bits = bits ^ ((bits >> 27) & (2**37 - 1))
    bits = bits * _MIX_64[1]
    return bits ^ ((bits >> 31) & (2**33 - 1))


def _narrowed(bits: Tensor) -> Tensor:
    """The low 32 bits of int64 values as int32, without leaving int32's range on the way."""
    return ((bits << 32) >> 32).to(torch.int32)
