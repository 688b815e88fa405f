"""A Gated DeltaNet layer between its two projections: drawn inputs, float64 to compare with, and the fused kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from trivet.geometry import RecurrentGeometry
from trivet.ops import (
    PackedRows,
    causal_conv_prefill,
    decay_and_beta,
    gated_delta_prefill,
    gated_rms_norm,
)
from trivet.ops.packed import ChunkTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PUBLISHED = RecurrentGeometry(key_heads=16, value_heads=48, key_dim=128, value_dim=128, conv_kernel=4)
"""The recurrent layers of Qwen3.5-27B."""
NORM_EPS = 1e-6
SPARE_SLOTS = 3
UNUSED_COLUMNS = 16
"""Behind a projection's, so that its rows are apart; those of published widths stay as aligned as they are served."""


@frozen(eq=False)
class DeltaLayer:
    """Parameters, and the states of all slots. The last slot is that of padding rows."""

    recurrent: RecurrentGeometry
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    states: Tensor
    tails: Tensor
    generator: torch.Generator

    @classmethod
    def drawn(cls, recurrent: RecurrentGeometry, rows: int, dtype: torch.dtype, seed: int) -> DeltaLayer:
        """Random parameters and states; heads forget at rates of 0.001 to 5 per token and around them."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        slots, heads, taps = rows + SPARE_SLOTS, recurrent.value_heads, recurrent.conv_kernel

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE)

        tails = normal(slots, taps - 1, recurrent.conv_channels).to(dtype).transpose(1, 2)
        return cls(
            recurrent=recurrent,
            conv_weight=(normal(recurrent.conv_channels, taps) * taps**-0.5).to(dtype),
            a_log=torch.rand(heads, generator=generator, device=DEVICE) * 8.5 - 6.9,
            dt_bias=normal(heads) * 2,
            norm_weight=(1 + 0.3 * normal(recurrent.value_dim)).to(dtype),
            states=normal(slots, *recurrent.state_shape),
            tails=tails,
            generator=generator,
        )

    @property
    def padding_slot(self) -> int:
        return self.states.shape[0] - 1

    def copied(self) -> DeltaLayer:
        """The same with states of its own."""
        tails = self.tails.transpose(1, 2).clone().transpose(1, 2)
        return evolve(self, states=self.states.clone(), tails=tails)

    def some_slots(self, rows: int) -> Tensor:
        """Slots of as many rows, in no order."""
        return torch.randperm(self.padding_slot, generator=self.generator, device=DEVICE)[:rows]

    def projected(self, tokens: int) -> Tensor:
        """``[tokens, elements]``, random, its rows apart from each other."""
        recurrent = self.recurrent
        width = recurrent.conv_channels + recurrent.value_elements + 2 * recurrent.value_heads
        drawn = torch.randn(tokens, width + UNUSED_COLUMNS, generator=self.generator, device=DEVICE)
        return drawn.to(self.norm_weight.dtype)[:, :width]

    def expected(self, projected: Tensor, slots: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """By the torch operations in float64: output, states and tails of the rows. Changes nothing."""
        recurrent, tokens, rows = self.recurrent, len(projected), PackedRows(lengths, projected.device)
        heads, elements = recurrent.value_heads, recurrent.value_elements
        mixed, gate, b, a = projected.double().split((recurrent.conv_channels, elements, heads, heads), dim=-1)
        mixed, tails = causal_conv_prefill(mixed, self.conv_weight.double(), self.tails[slots].double(), rows)
        query, key, value = mixed.split((recurrent.key_elements, recurrent.key_elements, elements), dim=-1)
        log_decay, beta = decay_and_beta(a, b, self.a_log.double(), self.dt_bias.double())
        out, states = gated_delta_prefill(
            query.reshape(tokens, recurrent.key_heads, recurrent.key_dim),
            key.reshape(tokens, recurrent.key_heads, recurrent.key_dim),
            value.reshape(tokens, heads, recurrent.value_dim),
            log_decay,
            beta,
            self.states[slots].double(),
            rows,
        )
        normed = gated_rms_norm(out, gate.reshape(out.shape), self.norm_weight.double(), NORM_EPS)
        return normed.view(tokens, elements), states, tails

    def decode(self, projected: Tensor, slots: Tensor, **how: object) -> Tensor:
        """One token of each row through the fused kernel."""
        from trivet.ops.fused.delta_decode import delta_decode

        out = torch.full((len(slots), self.recurrent.value_elements), torch.nan, dtype=projected.dtype, device=DEVICE)
        parameters = (self.recurrent, self.conv_weight, self.a_log, self.dt_bias, self.norm_weight, NORM_EPS)
        states = (self.states, self.tails, slots, self.padding_slot)
        delta_decode(projected, *parameters, *states, out, **how)  # type: ignore[arg-type]
        return out

    def snapshots(self, count: int) -> tuple[Tensor, Tensor]:
        """States and tails of as many snapshots, in which nothing is kept yet."""
        states = torch.full((count, *self.states.shape[1:]), torch.nan, device=DEVICE)
        channels, kept = self.tails.shape[1:]
        tails = torch.full((count, kept, channels), torch.nan, dtype=self.tails.dtype, device=DEVICE)
        return states, tails.transpose(1, 2)

    def chunks(
        self, projected: Tensor, slots: Tensor, table: ChunkTable, kept: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Rows of any lengths through the chunked kernels; `kept` are snapshots for the table's cuts."""
        from trivet.ops.fused.delta_chunks import delta_chunks

        shape = (len(projected), self.recurrent.value_elements)
        out = torch.full(shape, torch.nan, dtype=projected.dtype, device=DEVICE)
        parameters = (self.recurrent, self.conv_weight, self.a_log, self.dt_bias, self.norm_weight, NORM_EPS)
        return delta_chunks(projected, *parameters, self.states, self.tails, slots, table, out, *(kept or ()))


def build_kernels(recurrent: RecurrentGeometry, dtype: torch.dtype) -> None:
    """Compile what the kernels want for one geometry; in a process of its own, beside others."""
    layer = DeltaLayer.drawn(recurrent, 2, dtype, seed=0)
    slots = layer.some_slots(2)
    layer.decode(layer.projected(2), slots)
    layer.chunks(layer.projected(70), slots, PackedRows((3, 67), DEVICE).table(0))
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def apart(found: Tensor, expected: Tensor) -> float:
    """The length of the difference over that of what is expected."""
    return float((found.double() - expected).norm() / expected.norm())
