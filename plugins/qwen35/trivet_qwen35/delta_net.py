"""The recurrent mixer of Qwen3.5: Gated DeltaNet (arXiv 2412.06464) behind a short causal convolution."""

from __future__ import annotations

from torch import Tensor

from trivet.plugin import RecurrentGeometry
from trivet.plugin.layers import (
    Linear,
    Parameters,
    StepContext,
    causal_conv_decode,
    causal_conv_prefill,
    decay_and_beta,
    gated_delta_decode,
    gated_delta_prefill,
    gated_rms_norm,
)


class DeltaNet:
    """One recurrent layer over the state slots of the step's rows.

    Args:
        layer: index of the layer, which names its states.
        geometry: heads, widths and taps.
        eps: epsilon of the gated norm, whose weight is not zero-centred.
        parameters: holds ``in`` (queries, keys, values, output gate, beta, decay), ``conv``, ``a_log``, ``dt_bias``,
            ``norm`` and ``out``.
    """

    def __init__(self, layer: int, geometry: RecurrentGeometry, eps: float, parameters: Parameters) -> None:
        self.layer = layer
        self.geometry = geometry
        self.eps = eps
        self.projection = Linear(parameters.below("in"))
        self.conv_weight = parameters["conv.weight"]
        self.a_log = parameters["a_log"]
        self.dt_bias = parameters["dt_bias"]
        self.norm_weight = parameters["norm.weight"]
        self.out = Linear(parameters.below("out"))

    def __call__(self, hidden: Tensor, step: StepContext, residual: Tensor | None = None) -> Tensor:
        """``hidden [tokens, hidden_size]`` to the same shape, added to `residual` in place if there is one.

        Advances the state of every row's slot.
        """
        geometry, tokens = self.geometry, hidden.shape[0]
        heads = (geometry.value_heads, geometry.value_heads)
        projected = self.projection(hidden)
        fused = step.delta_rule_projected(
            self.layer,
            geometry,
            projected,
            conv_weight=self.conv_weight,
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            norm_weight=self.norm_weight,
            norm_eps=self.eps,
        )
        if fused is not None:
            return self.out(fused, residual)
        mixed, gate, b, a = projected.split((geometry.conv_channels, geometry.value_elements, *heads), dim=-1)
        mixed = self._convolve(mixed, step)
        query, key, value = mixed.split((geometry.key_elements, geometry.key_elements, geometry.value_elements), dim=-1)
        query = query.view(tokens, geometry.key_heads, geometry.key_dim)
        key = key.view(tokens, geometry.key_heads, geometry.key_dim)
        value = value.view(tokens, geometry.value_heads, geometry.value_dim)
        log_decay, beta = decay_and_beta(a, b, self.a_log, self.dt_bias)
        states = step.recurrent_state(self.layer)
        state = states.index_select(0, step.slots)
        if step.rows.single:
            mixed, state = gated_delta_decode(query, key, value, log_decay, beta, state, out_state=state)
        else:
            mixed, state = gated_delta_prefill(query, key, value, log_decay, beta, state, step.rows)
        states.index_copy_(0, step.slots, state)
        normed = gated_rms_norm(mixed, gate.view_as(mixed), self.norm_weight, self.eps)
        return self.out(normed.view(tokens, geometry.value_elements), residual)

    def _convolve(self, mixed: Tensor, step: StepContext) -> Tensor:
        """The causal convolution, with the tails of the rows' slots carried across steps."""
        tails = step.conv_tail(self.layer)
        tail = tails.index_select(0, step.slots)
        if step.rows.single:
            mixed, tail = causal_conv_decode(mixed, self.conv_weight, tail)
        else:
            mixed, tail = causal_conv_prefill(mixed, self.conv_weight, tail, step.rows)
        tails.index_copy_(0, step.slots, tail)
        return mixed
