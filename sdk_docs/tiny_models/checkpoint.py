"""Writing a model to a folder as transformers does, in bfloat16, and seeding one with random weights."""

import json
from pathlib import Path
from typing import Any

from .geometries import END_TOKEN_IDS, LARGEST_CHECKPOINT_BYTES, model_class, model_config
from .tokenizer import transformers_tokenizer

RANDOM_MARKER = "trivet_weights"
"""Key of config.json that is ``"random"`` while a checkpoint was never trained, and absent once it was."""


def spread_time_steps(heads: int) -> Any:
    """`dt_bias` of recurrent heads whose time steps spread from 0.001 to 0.1, float32 of shape (heads,).

    transformers starts them all at one, where a state is forgotten within a token; this is the start of the Mamba
    papers (Gu and Dao, 2023), with memories from ten to some thousand tokens.
    """
    import torch

    steps = torch.logspace(-3, -1, heads)
    return steps + torch.log(-torch.expm1(-steps))  # the inverse of softplus


def random_model(name: str, seed: int) -> Any:
    """The model `name` with seeded random weights of unit gain, its norms, decays and biases among them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = model_class(name)(model_config(name))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter_name.endswith("embed_tokens.weight"):
                parameter.copy_(0.1 * noise)
            elif parameter_name.endswith("dt_bias"):
                parameter.copy_(spread_time_steps(parameter.numel()) + 0.1 * noise)
            elif parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
    return model


def write_checkpoint(model: Any, tokenizer: Any, folder: Path, random: bool = False) -> None:
    """Save `model` (as bfloat16) and `tokenizer` into `folder`; mark it where its weights are random."""
    import torch
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=list(END_TOKEN_IDS), pad_token_id=END_TOKEN_IDS[0]
    )
    trained_tokenizer = tokenizer.to_str(pretty=True)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    transformers_tokenizer(tokenizer, model.config.max_position_embeddings).save_pretrained(folder)
    # transformers adds an empty post-processor; what ships is the trained tokenizer alone, byte for byte.
    (folder / "tokenizer.json").write_text(trained_tokenizer, encoding="utf-8")
    (folder / "model.safetensors").chmod(0o644)  # written for its owner alone, but a package's file is everyone's
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop(RANDOM_MARKER, None)
    if random:
        config[RANDOM_MARKER] = "random"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    size_bytes = (folder / "model.safetensors").stat().st_size
    if size_bytes > LARGEST_CHECKPOINT_BYTES:
        raise ValueError(f"{folder}: {size_bytes} bytes of weights, at most {LARGEST_CHECKPOINT_BYTES} may ship")
