"""What the layers of one step share. The runtime makes it and passes it down; nothing is read from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trivet.attention import PlanOwner
from trivet.caches.kv import KvCache
from trivet.caches.state import StatePool
from trivet.errors import PluginError
from trivet.geometry import AttentionGeometry, ModelGeometry, RecurrentGeometry
from trivet.layers.norm import RmsNorm
from trivet.layers.rotary import RotaryTable
from trivet.ops.dispatch import fused_kernels
from trivet.ops.packed import PackedRows


class StepContext:
    """One step: its rows, their positions, and the caches that its layers read and write.

    Attributes:
        rows: lengths of the rows along the packed token dimension, decode rows first. In a captured step they are those
            of the capture: a short prompt is padded to it.
        decode_rows: how many leading rows are decode rows.
        slots: int64 ``[rows]``, state slot of each row.
        outputs: int64, the tokens whose hidden states somebody reads behind the last layer; None for all.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        owners: Mapping[AttentionGeometry, PlanOwner],
        rotary: Mapping[AttentionGeometry, RotaryTable],
        cache: KvCache,
        state: StatePool | None,
        rows: PackedRows,
        decode_rows: int,
        slots: torch.Tensor,
        outputs: torch.Tensor | None = None,
    ) -> None:
        self._geometry = geometry
        self._owners = owners
        self._rotary = rotary
        self._cache = cache
        self._state = state
        self._rotations: dict[AttentionGeometry, tuple[torch.Tensor, torch.Tensor]] = {}
        self._cut_layers: set[int] = set()
        self.rows = rows
        self.decode_rows = decode_rows
        self.slots = slots
        self.outputs = outputs
        self.dropped_tokens = False

    def rotation(self, attention: AttentionGeometry) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the step's tokens for `attention`, gathered once per step.

        Both are as `trivet.ops.rotary.apply_rotary` takes them, for the plan's own positions.
        """
        rotation = self._rotations.get(attention)
        if rotation is None:
            rotation = self._rotary[attention].at(self._owners[attention].positions)
            self._rotations[attention] = rotation
        return rotation

    def wanted(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of the tokens that are read behind the mixer of `layer`.

        That is all of them but in the last layer, where tokens that give neither a new token nor a score have left what
        later steps need of them, and are dropped: `dropped_tokens` says so. A layer need not ask.

        Args:
            hidden: ``[tokens, hidden_size]``.

        Returns:
            `hidden`, or ``[outputs, hidden_size]``, new, with which the layer is to go on.

        Raises:
            PluginError: it was asked with other hidden states.
        """
        if self.outputs is None or layer != len(self._geometry.layers) - 1:
            return hidden
        if self.dropped_tokens or hidden.shape[0] != self.rows.tokens:
            raise PluginError(
                f"StepContext.wanted({layer}): found hidden states of {hidden.shape[0]} tokens, expected those of all "
                f"{self.rows.tokens} tokens of the step, once, between the last layer's mixer and its MLP"
            )
        self.dropped_tokens = True
        return hidden.index_select(0, self.outputs)

    def attend(
        self, layer: int, attention: AttentionGeometry, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Append the step's keys and values to the cache of `layer` and attend.

        Args:
            query: ``[tokens, query_heads, head_dim]``, rotated.
            key, value: ``[tokens, kv_heads, head_dim]``, the key rotated.

        Returns:
            ``[tokens, query_heads, head_dim]``.
        """
        owner = self._owners[attention]
        keys, values = self._cache.layer(layer)
        owner.append(key, value, keys, values)
        return owner.attend(query, keys, values)

    def attend_projected(
        self,
        layer: int,
        attention: AttentionGeometry,
        projected: torch.Tensor,
        *,
        q_norm: RmsNorm | None,
        k_norm: RmsNorm | None,
        output_gate: bool,
    ) -> torch.Tensor | None:
        """From a projection to what the output projection takes, with one kernel for all that precedes attention.

        Args:
            projected: ``[tokens, elements]``: query heads, each followed by its gate if there are gates, key heads and
                value heads.
            q_norm, k_norm: norms of the heads, or None.
            output_gate: whether there are gates.

        Returns:
            ``[tokens, query_elements]``, or None where there is no such kernel or the plan's owner does not say where
            tokens go: nothing was done then.
        """
        kernels, owner = fused_kernels(projected), self._owners[attention]
        token_places = None if kernels is None else getattr(owner, "token_places", None)
        if kernels is None or token_places is None or projected.stride(1) != 1:
            return None
        norms = None
        if q_norm is not None and k_norm is not None:
            norms = (q_norm.weight, k_norm.weight, q_norm.eps, q_norm.zero_centred)
        rotary, (keys, values) = self._rotary[attention], self._cache.layer(layer)
        query = kernels.norm_rotate_append(
            projected,
            attention.query_heads,
            norms,
            rotary.buffers["table"],
            rotary.rotary_dim,
            token_places(projected),
            keys,
            values,
            gated=output_gate,
        )
        attended = owner.attend(query, keys, values)
        if output_gate:
            gates = projected[:, : 2 * attention.query_elements].unflatten(1, (attention.query_heads, 2, -1))[:, :, 1]
            kernels.output_gate(attended, gates)
        return attended.view(projected.shape[0], attention.query_elements)

    def delta_rule_projected(
        self,
        layer: int,
        recurrent: RecurrentGeometry,
        projected: torch.Tensor,
        *,
        conv_weight: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_eps: float,
    ) -> torch.Tensor | None:
        """From a projection to what the output projection takes, through a Gated DeltaNet layer, by fused kernels.

        Not a bit of a decode row depends on the rows beside it, nor on how many there are. The other rows go through
        the delta rule in chunks, those of one token too. States and tails of the rows' slots advance, and are kept as
        they are at the rows' cuts; decode rows in the padding slot give zeros and change nothing.

        Args:
            projected: ``[tokens, elements]``: queries, keys and values before the convolution, output gates, beta
                before its sigmoid, and a.
            conv_weight: ``[conv_channels, conv_kernel]``.
            a_log, dt_bias: ``[value_heads]``.
            norm_weight, norm_eps: of the norm over a value head, not zero-centred.

        Returns:
            ``[tokens, value_elements]``, or None where there are no such kernels: nothing was done then.
        """
        kernels, state = fused_kernels(projected), self._state
        if kernels is None or state is None or projected.stride(1) != 1 or not kernels.decode_serves(recurrent):
            return None
        tokens, first_chunk = projected.shape[0], self.decode_rows
        chunked = tokens > first_chunk
        if chunked and not kernels.chunks_serve(recurrent):
            return None
        out = projected.new_empty((tokens, recurrent.value_elements))
        parameters = (recurrent, conv_weight, a_log, dt_bias, norm_weight, norm_eps)
        states, tails = state.recurrent(layer), state.tail(layer)
        if first_chunk:
            kernels.delta_decode(
                projected[:first_chunk],
                *parameters,
                states,
                tails,
                self.slots[:first_chunk],
                state.live_slots,
                out[:first_chunk],
            )
        if chunked:
            kernels.delta_chunks(
                projected[first_chunk:],
                *parameters,
                states,
                tails,
                self.slots[first_chunk:],
                self.rows.table(first_chunk),
                out[first_chunk:],
                *state.kept(layer),
            )
            self._cut_layers.add(layer)
        return out

    @property
    def made_cuts(self) -> bool:
        """Whether every recurrent layer has kept its state at the cuts of the rows; vacuously so where there are none.

        The shared kernels do, in any step with prefill rows. Layers that go through `recurrent_state` know of no cuts.
        """
        return self._cut_layers.issuperset(self._geometry.recurrent_layers)

    def recurrent_state(self, layer: int) -> torch.Tensor:
        """``[slots, value_heads, key_dim, value_dim]``, float32: the state of every slot, to be updated in place."""
        assert self._state is not None
        return self._state.recurrent(layer)

    def conv_tail(self, layer: int) -> torch.Tensor:
        """``[slots, conv_channels, conv_kernel - 1]``: the convolution tails of every slot, updated in place."""
        assert self._state is not None
        return self._state.tail(layer)
