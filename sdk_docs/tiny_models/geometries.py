"""The two models: their transformers config, and how large they may be on disk.

Both are what the project is about in small: more query heads per KV head than a decode kernel is compiled for
(groups of 5 and 6), with a head dimension that the CUDA kernels take. Everything else is as small as fluent
stories allow.
"""

from collections.abc import Mapping
from typing import Any

MODEL_NAMES = ("tiny-qwen3", "tiny-qwen35")
VOCABULARY_TOKENS = 2048
LARGEST_CHECKPOINT_BYTES = 8_000_000

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)  # ids 0, 1, 2
END_TOKEN_IDS = (0, 2)

_SHARED: Mapping[str, Any] = {
    "vocab_size": VOCABULARY_TOKENS,
    "hidden_size": 192,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": list(END_TOKEN_IDS),
    "pad_token_id": 0,
}


def model_config(name: str) -> Any:
    """The transformers config of a model in `MODEL_NAMES`."""
    from transformers import Qwen3_5TextConfig, Qwen3Config

    if name == "tiny-qwen3":
        return Qwen3Config(
            **_SHARED,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=5,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
    if name == "tiny-qwen35":
        return Qwen3_5TextConfig(
            **_SHARED,
            intermediate_size=448,
            num_hidden_layers=8,
            layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
            num_attention_heads=6,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            linear_conv_kernel_dim=4,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        )
    raise ValueError(f"unknown model {name!r}; this recipe makes {', '.join(MODEL_NAMES)}")


def model_class(name: str) -> Any:
    """The transformers class that trains and stores a model in `MODEL_NAMES`."""
    from transformers import Qwen3_5ForCausalLM, Qwen3ForCausalLM

    return {"tiny-qwen3": Qwen3ForCausalLM, "tiny-qwen35": Qwen3_5ForCausalLM}[name]
