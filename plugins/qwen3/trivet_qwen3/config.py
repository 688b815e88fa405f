"""config.json of a Qwen3 checkpoint, read into geometry."""

from __future__ import annotations

from attrs import frozen

from trivet.plugin import (
    AttentionGeometry,
    ConfigDocument,
    ModelGeometry,
    Rope,
    read_dtype,
    refuse_unserved_features,
    tied_embeddings,
)

MOST_LAYERS = 1024
FULL = "full_attention"


@frozen(kw_only=True)
class Qwen3Geometry(ModelGeometry):
    """A Qwen3 model.

    Attributes:
        attention_bias: biases on the projections of attention (``attention_bias``).
    """

    attention_bias: bool


def read_geometry(document: ConfigDocument) -> Qwen3Geometry:
    """Read the geometry. Keys and defaults are those of transformers' ``Qwen3Config``.

    Raises:
        ConfigError: a value of the wrong type or range, or a feature that is not served.
    """
    refuse_unserved_features(document)
    document.string("hidden_act", "silu", allowed=("silu",))
    layers = document.integer("num_hidden_layers", maximum=MOST_LAYERS)
    kinds = document.strings("layer_types", (FULL,) * layers)
    if len(kinds) != layers or set(kinds) != {FULL}:
        raise document.error("layer_types", f"{layers} times {FULL!r} (num_hidden_layers)", "correct the config")
    query_heads = document.integer("num_attention_heads")
    attention = AttentionGeometry(
        query_heads=query_heads,
        kv_heads=document.integer("num_key_value_heads", query_heads),
        head_dim=(head_dim := document.integer("head_dim", 128)),
        rope=Rope.read(document, head_dim),
    )
    return Qwen3Geometry(
        model_type=document.model_type,
        hidden_size=document.integer("hidden_size"),
        intermediate_size=document.integer("intermediate_size"),
        vocab_size=document.integer("vocab_size"),
        layers=(attention,) * layers,
        norm_eps=document.number("rms_norm_eps", 1e-6, minimum=0.0, maximum=1.0),
        max_positions=document.integer("max_position_embeddings", 32768),
        tied_embeddings=tied_embeddings(document),
        dtype=read_dtype(document),
        attention_bias=document.boolean("attention_bias", False),
    )
