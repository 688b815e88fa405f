"""Tiny checkpoints made with transformers, every parameter randomised so that a wrong convention shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter: matrices at a scale that keeps logits apart, norm weights and biases away from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if name.endswith("A_log"):
                parameter.copy_(torch.log(torch.rand(parameter.shape, generator=generator) * 0.049 + 0.001))
            elif name.endswith("dt_bias"):
                parameter.copy_(-torch.rand(parameter.shape, generator=generator))
            elif "conv1d" in name:
                parameter.copy_(noise * 0.5)
            elif parameter.dim() >= 2:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.1)
            else:
                parameter.copy_(parameter + noise * 0.3)


def make_qwen3(directory: Path, *, seed: int = 0, shard_size: str = "5GB", **overrides: Any) -> Any:
    """Save a tiny Qwen3 checkpoint to `directory`; returns the float32 model on CPU as the oracle."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    settings.update(overrides)
    model = Qwen3ForCausalLM(Qwen3Config(**settings)).eval().float()
    randomise(model, seed)
    model.generation_config.eos_token_id = settings["eos_token_id"]
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


def make_qwen35(directory: Path, *, seed: int = 0, **overrides: Any) -> Any:
    """Save a tiny text-only Qwen3.5 checkpoint to `directory`; returns the float32 model on CPU as the oracle."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    settings.update(overrides)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings)).eval().float()
    randomise(model, seed)
    model.generation_config.eos_token_id = settings["eos_token_id"]
    model.save_pretrained(directory)
    return model


@torch.inference_mode()
def oracle_logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities of every position, ``[tokens, vocabulary]`` in float32: one full forward, batch 1."""
    logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)
