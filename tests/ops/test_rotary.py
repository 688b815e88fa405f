"""Rotary tables and their application agree with transformers, whole and partial."""

import numpy as np
import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as whole_oracle
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb as partial_oracle

from trivet.ops import (
    apply_rotary,
    apply_rotary_,
    fill_rotary_table,
    rotary_rows,
)

HEAD_DIM = 32


def frequencies(rotary_dim: int, theta: float = 1e6) -> np.ndarray:
    return (1.0 / theta ** (np.arange(0, rotary_dim, 2, dtype=np.float32) / rotary_dim)).astype(np.float32)


def rotary_tables(
    inverse_frequencies: np.ndarray, attention_scaling: float, positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of positions 0 to `positions` - 1, from a table of their own."""
    rotary_dim = 2 * len(inverse_frequencies)
    table = torch.empty(positions * rotary_dim)
    fill_rotary_table(table, inverse_frequencies, attention_scaling)
    return rotary_rows(table, torch.arange(positions), rotary_dim, torch.float32)


def qwen3() -> Qwen3RotaryEmbedding:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return Qwen3RotaryEmbedding(Qwen3Config(head_dim=HEAD_DIM, rope_parameters=rope))


def qwen35(factor: float, sections: bool) -> Qwen3_5TextRotaryEmbedding:
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": factor}
    if sections:
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(head_dim=HEAD_DIM, rope_parameters=rope))


def rows_of(module: torch.nn.Module, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a table filled with the frequencies of transformers' module."""
    rotary_dim = 2 * len(module.inv_freq)
    table = torch.full((40_000 * rotary_dim,), torch.nan)
    fill_rotary_table(table, module.inv_freq, module.attention_scaling)
    return rotary_rows(table, positions, rotary_dim, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_heads_are_rotated_as_in_qwen3(dtype: torch.dtype) -> None:
    module, positions = qwen3(), torch.randint(0, 40_000, (9,))
    x = torch.randn(9, 3, HEAD_DIM).to(dtype)
    ours = apply_rotary(x, *rows_of(module, positions, dtype))
    theirs, _ = whole_oracle(x[None], x[None], *module(x, positions[None]), unsqueeze_dim=2)
    tolerance = 1e-6 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(ours, theirs[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sections", [False, True])
@pytest.mark.parametrize("factor", [0.25, 0.5])
def test_partial_heads_are_rotated_as_in_qwen35(factor: float, sections: bool) -> None:
    module, positions = qwen35(factor, sections), torch.randint(0, 40_000, (9,))
    x = torch.randn(9, 3, HEAD_DIM)
    ours = apply_rotary(x, *rows_of(module, positions, x.dtype))
    cos, sin = module(x, positions[None, None].expand(3, 1, -1))
    theirs, _ = partial_oracle(x[None], x[None], cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(ours, theirs[0], rtol=1e-6, atol=1e-6)
    rotary_dim = int(HEAD_DIM * factor)
    assert torch.equal(ours[..., rotary_dim:], x[..., rotary_dim:])


def test_an_entry_is_paired_with_the_one_half_the_rotary_dimension_away() -> None:
    cos, signed_sin = rotary_tables(frequencies(8, theta=10.0), 1.0, 4)
    for entry in range(8):
        x = torch.zeros(4, 1, 12)
        x[:, 0, entry] = 1.0
        touched = apply_rotary(x, cos, signed_sin)[3, 0].nonzero().flatten().tolist()
        assert touched == sorted((entry, (entry + 4) % 8))


def test_attention_scaling_scales_what_is_rotated() -> None:
    x = torch.randn(5, 2, 16)
    plain = apply_rotary(x, *rotary_tables(frequencies(8), 1.0, 5))
    scaled = apply_rotary(x, *rotary_tables(frequencies(8), 1.5, 5))
    torch.testing.assert_close(scaled[..., :8], 1.5 * plain[..., :8])
    assert torch.equal(scaled[..., 8:], x[..., 8:])


def test_the_table_is_filled_whole_and_in_place() -> None:
    table = torch.full((11 * 6,), torch.nan)
    pointer = table.data_ptr()
    fill_rotary_table(table, torch.from_numpy(frequencies(6)), 1.0)
    assert table.data_ptr() == pointer
    rows = table.view(11, 2, 3)
    torch.testing.assert_close(rows.square().sum(1), torch.ones(11, 3))
    angles = np.arange(11)[:, None] * frequencies(6).astype(np.float64)
    torch.testing.assert_close(rows[:, 1], torch.from_numpy(np.sin(angles)).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("elements", [7, 13])
def test_a_table_of_part_of_a_row_is_refused(elements: int) -> None:
    with pytest.raises(ValueError, match=r"multiple of 6 elements"):
        fill_rotary_table(torch.zeros(elements), frequencies(6), 1.0)


def test_heads_inside_a_fused_projection_are_rotated_where_they_lie() -> None:
    fused = torch.randn(6, 5 * 16)
    before = fused.clone()
    heads = fused[:, : 3 * 16].view(6, 3, 16)
    cos, signed_sin = rotary_tables(frequencies(8), 1.0, 6)
    rotated = apply_rotary_(heads, cos, signed_sin)
    assert rotated.data_ptr() == fused.data_ptr()
    torch.testing.assert_close(heads, apply_rotary(before[:, :48].view(6, 3, 16), cos, signed_sin))
    assert torch.equal(fused[:, 48:], before[:, 48:])


def test_rows_with_and_without_a_head_dimension_do_the_same() -> None:
    x = torch.randn(6, 3, 16)
    before = x.clone()
    cos, signed_sin = rotary_tables(frequencies(16), 1.0, 6)
    assert torch.equal(apply_rotary(x, cos, signed_sin), apply_rotary(x, cos[:, 0], signed_sin[:, 0]))
    assert torch.equal(x, before)
