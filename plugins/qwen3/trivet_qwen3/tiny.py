"""Small models that turn every knob which `trivet_qwen3.config` reads, for conformance."""

from __future__ import annotations

TINY_CONFIGS: dict[str, dict[str, object]] = {
    "grouped": {
        "model_type": "qwen3",
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-3,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    "biased": {
        "model_type": "qwen3",
        "vocab_size": 53,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "attention_bias": True,
        "max_position_embeddings": 256,
        "rope_theta": 5000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
    "wide": {
        "model_type": "qwen3",
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}
"""``biased`` speaks the older dialect of rope, and leaves to defaults what may be left to them. ``wide`` has heads
that kernel libraries are made for, in groups of five, which they are not."""
