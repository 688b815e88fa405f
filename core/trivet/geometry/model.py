"""What a model is, as far as sizes and the runtime are concerned. Families subclass it to add their own fields."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field, frozen

from trivet.errors import ConfigError
from trivet.geometry.attention import AttentionGeometry
from trivet.geometry.recurrent import RecurrentGeometry

LayerGeometry = AttentionGeometry | RecurrentGeometry


def _layers(layers: Iterable[LayerGeometry]) -> tuple[LayerGeometry, ...]:
    return tuple(layers)


@frozen(kw_only=True)
class ModelGeometry:
    """A decoder-only model, read once from config.json by its family.

    Attributes:
        model_type: the ``model_type`` that named the family.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        vocab_size: rows of the embedding, and width of the logits.
        layers: one entry per decoder layer, in order.
        norm_eps: epsilon of the RMS norms (``rms_norm_eps``), from 0 to 1.
        max_positions: longest context that the model was made for (``max_position_embeddings``).
        tied_embeddings: whether the output projection is the embedding matrix.
        dtype: dtype that the checkpoint states, the default for serving.

    Raises:
        ConfigError: there are no layers, or `norm_eps` is out of range.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    layers: tuple[LayerGeometry, ...] = field(converter=_layers)
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    dtype: str

    def __attrs_post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(f"model {self.model_type!r} has no layers: num_hidden_layers must be at least 1")
        if not 0.0 <= self.norm_eps <= 1.0:
            raise ConfigError(
                f"model {self.model_type!r}: the epsilon of its norms is {self.norm_eps!r}, expected a number from "
                "0 to 1; correct rms_norm_eps in config.json"
            )

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with full attention."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer, AttentionGeometry))

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a recurrent state."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer, RecurrentGeometry))

    @property
    def attention_geometries(self) -> tuple[AttentionGeometry, ...]:
        """The distinct attention geometries, in order of first use: one plan owner each."""
        return tuple(dict.fromkeys(layer for layer in self.layers if isinstance(layer, AttentionGeometry)))

    @property
    def hybrid(self) -> bool:
        """Whether any layer carries a recurrent state."""
        return bool(self.recurrent_layers)
