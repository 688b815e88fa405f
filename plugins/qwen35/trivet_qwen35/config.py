"""config.json of a Qwen3.5 checkpoint, multimodal or text-only, read into geometry."""

from __future__ import annotations

from attrs import frozen

from trivet.plugin import (
    AttentionGeometry,
    ConfigDocument,
    LayerGeometry,
    ModelGeometry,
    RecurrentGeometry,
    Rope,
    read_dtype,
    refuse_unserved_features,
    tied_embeddings,
)

MULTIMODAL = "qwen3_5"
"""As published: the language model's config is nested in ``text_config``."""
TEXT_ONLY = "qwen3_5_text"

LINEAR, FULL = "linear_attention", "full_attention"
MOST_LAYERS = 1024
PARTIAL_ROTARY_FACTOR = 0.25
"""Of the head dimension, where the config is silent."""


@frozen(kw_only=True)
class Qwen35Geometry(ModelGeometry):
    """A Qwen3.5 language model.

    Attributes:
        attention_bias: biases on the projections of full attention (``attention_bias``).
    """

    attention_bias: bool


def read_geometry(document: ConfigDocument) -> Qwen35Geometry:
    """Read the geometry. Keys and defaults are those of transformers' ``Qwen3_5TextConfig``.

    Raises:
        ConfigError: a value of the wrong type or range, or a feature that is not served.
    """
    refuse_unserved_features(document)
    text = document.sub("text_config") if document.model_type == MULTIMODAL else document
    text.string("hidden_act", "silu", allowed=("silu",))
    query_heads = text.integer("num_attention_heads")
    head_dim = text.integer("head_dim", 256)
    attention = AttentionGeometry(
        query_heads=query_heads,
        kv_heads=text.integer("num_key_value_heads", query_heads),
        head_dim=head_dim,
        rope=Rope.read(text, head_dim, default_rotary_factor=PARTIAL_ROTARY_FACTOR),
    )
    recurrent = RecurrentGeometry(
        key_heads=text.integer("linear_num_key_heads", 16),
        value_heads=text.integer("linear_num_value_heads", 32),
        key_dim=text.integer("linear_key_head_dim", 128),
        value_dim=text.integer("linear_value_head_dim", 128),
        conv_kernel=text.integer("linear_conv_kernel_dim", 4),
    )
    return Qwen35Geometry(
        model_type=document.model_type,
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        vocab_size=text.integer("vocab_size"),
        layers=_layers(text, attention, recurrent),
        norm_eps=text.number("rms_norm_eps", 1e-6, minimum=0.0, maximum=1.0),
        max_positions=text.integer("max_position_embeddings", 32768),
        tied_embeddings=tied_embeddings(document),
        dtype=read_dtype(document),
        attention_bias=text.boolean("attention_bias", False),
    )


def _layers(
    text: ConfigDocument, attention: AttentionGeometry, recurrent: RecurrentGeometry
) -> tuple[LayerGeometry, ...]:
    """One geometry per layer: ``layer_types`` decides, else every ``full_attention_interval``-th layer attends."""
    count = text.integer("num_hidden_layers", maximum=MOST_LAYERS)
    interval = text.integer("full_attention_interval", 4)
    kinds = text.strings("layer_types", [LINEAR if (i + 1) % interval else FULL for i in range(count)])
    if len(kinds) != count or not set(kinds) <= {LINEAR, FULL}:
        raise text.error(
            "layer_types", f"{count} entries (num_hidden_layers), each {LINEAR!r} or {FULL!r}", "correct the config"
        )
    return tuple(attention if kind == FULL else recurrent for kind in kinds)
