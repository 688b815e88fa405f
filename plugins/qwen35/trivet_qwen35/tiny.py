"""Small models that turn every knob which `trivet_qwen35.config` reads, for conformance."""

from __future__ import annotations

from trivet_qwen35.config import FULL, LINEAR, MULTIMODAL, TEXT_ONLY

_HYBRID: dict[str, object] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "dtype": "float32",
}
"""Three recurrent layers before one with full attention, by the default interval."""

_LISTED: dict[str, object] = {
    "vocab_size": 53,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "layer_types": [FULL, LINEAR, FULL],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "attention_bias": True,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "max_position_embeddings": 256,
    "partial_rotary_factor": 0.5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
"""Layers by name, biases, and half of each head rotated."""

_WIDE: dict[str, object] = {
    **_HYBRID,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}
"""Heads that kernel libraries are made for, in groups of six."""

TINY_CONFIGS: dict[str, dict[str, object]] = {
    "hybrid": {"model_type": TEXT_ONLY, **_HYBRID},
    "listed": {"model_type": TEXT_ONLY, **_LISTED},
    "wide": {"model_type": TEXT_ONLY, **_WIDE},
    "multimodal": {
        "model_type": MULTIMODAL,
        "tie_word_embeddings": True,
        "vision_config": {"hidden_size": 32},
        "text_config": {"model_type": TEXT_ONLY, **_HYBRID},
    },
    "multimodal-listed": {
        "model_type": MULTIMODAL,
        "tie_word_embeddings": True,
        "text_config": {"model_type": TEXT_ONLY, **_LISTED},
    },
}
"""Published checkpoints repeat ``tie_word_embeddings`` at the root, where it need not be the language model's."""
