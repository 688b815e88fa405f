"""Grouped-query attention over the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from trivet.geometry import AttentionGeometry
from trivet.layers.context import StepContext
from trivet.layers.linear import Linear
from trivet.layers.norm import RmsNorm
from trivet.layers.parameters import Parameters
from trivet.ops.norm import query_key_rms_norm
from trivet.ops.rotary import apply_rotary_


class Attention:
    """Projections, optional norms of query and key heads, rotary embedding, paged attention, output projection.

    Args:
        layer: index of the layer, which names its cache.
        geometry: heads, head dim and rope.
        parameters: holds ``qkv``, ``out`` and, with `qk_norm_eps`, ``q_norm`` and ``k_norm``.
        qk_norm_eps: epsilon of the norms over each query and key head; None for no such norms.
        zero_centred_norm: whether those norms multiply by ``1 + weight``.
        output_gate: the query rows of ``qkv`` hold, head by head, the query and then a gate; the attention output
            is multiplied by the sigmoid of the gate.
    """

    def __init__(
        self,
        layer: int,
        geometry: AttentionGeometry,
        parameters: Parameters,
        *,
        qk_norm_eps: float | None = None,
        zero_centred_norm: bool = False,
        output_gate: bool = False,
    ) -> None:
        self.layer = layer
        self.geometry = geometry
        self.output_gate = output_gate
        self.qkv = Linear(parameters.below("qkv"))
        self.out = Linear(parameters.below("out"))
        self.q_norm: RmsNorm | None = None
        self.k_norm: RmsNorm | None = None
        if qk_norm_eps is not None:
            self.q_norm = RmsNorm(parameters.below("q_norm"), qk_norm_eps, zero_centred=zero_centred_norm)
            self.k_norm = RmsNorm(parameters.below("k_norm"), qk_norm_eps, zero_centred=zero_centred_norm)

    def __call__(self, hidden: Tensor, step: StepContext, residual: Tensor | None = None) -> Tensor:
        """``hidden [tokens, hidden_size]`` to the same shape, added to `residual` in place if there is one."""
        geometry, tokens = self.geometry, hidden.shape[0]
        query_heads, kv_heads = geometry.query_heads, geometry.kv_heads
        projected = self.qkv(hidden)
        attended = step.attend_projected(
            self.layer, geometry, projected, q_norm=self.q_norm, k_norm=self.k_norm, output_gate=self.output_gate
        )
        if attended is not None:
            return self.out(attended, residual)
        gate: Tensor | None = None
        if self.output_gate:
            query_rows = 2 * geometry.query_elements
            query, rest = projected.tensor_split((query_rows,), dim=-1)
            query, gate = query.view(tokens, query_heads, 2, geometry.head_dim).unbind(2)
            key, value = rest.view(tokens, 2 * kv_heads, geometry.head_dim).tensor_split((kv_heads,), 1)
            heads = torch.cat((query, key), 1)
        else:
            every_head = projected.view(tokens, query_heads + 2 * kv_heads, geometry.head_dim)
            heads, value = every_head.tensor_split((query_heads + kv_heads,), 1)
        # Query and key heads lie side by side from here on, so that one operation serves both.
        if self.q_norm is not None and self.k_norm is not None:
            heads = query_key_rms_norm(
                heads,
                self.q_norm.weight,
                self.k_norm.weight,
                query_heads,
                self.q_norm.eps,
                self.q_norm.zero_centred,
            )
        apply_rotary_(heads, *step.rotation(geometry))
        query, key = heads.tensor_split((query_heads,), 1)
        attended = step.attend(self.layer, geometry, query, key, value)
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        return self.out(attended.reshape(tokens, geometry.query_elements), residual)
