"""Published Qwen3.5 checkpoints are multimodal on disk: rewrite a text-only one into that form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VISION_CONFIG = {"model_type": "qwen3_5", "depth": 1, "hidden_size": 8, "num_heads": 2, "patch_size": 4}


def unserved_tensors() -> dict[str, torch.Tensor]:
    """Tensors of the vision tower and of multi-token prediction, under their published names; all NaN."""
    shapes = {
        "model.visual.patch_embed.proj.weight": (8, 3, 2, 4, 4),
        "model.visual.blocks.0.attn.qkv.weight": (24, 8),
        "model.visual.merger.linear_fc1.bias": (32,),
        "mtp.fc.weight": (48, 96),
        "mtp.layers.0.self_attn.q_proj.weight": (192, 48),
        "mtp.norm.weight": (48,),
    }
    return {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}


def write_multimodal(
    source: Path,
    target: Path,
    *,
    text: Mapping[str, Any] | None = None,
    root: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor | None] | None = None,
) -> Path:
    """Write the multimodal form of the text-only checkpoint `source` to `target`, which is returned.

    Args:
        text, root: values to set in ``text_config`` and beside it; None removes a key.
        tensors: tensors to add; None removes one.
    """
    target.mkdir(parents=True, exist_ok=True)
    nested = json.loads((source / "config.json").read_text())
    nested.pop("architectures", None)
    version = nested.pop("transformers_version", None)
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 90,
        "model_type": "qwen3_5",
        "text_config": nested,
        "tie_word_embeddings": nested.get("tie_word_embeddings", False),
        "transformers_version": version,
        "video_token_id": 91,
        "vision_config": dict(VISION_CONFIG),
    }
    for section, changes in ((nested, text or {}), (config, root or {})):
        section.update(changes)
        for key in [key for key, value in section.items() if key in changes and value is None]:
            del section[key]
    (target / "config.json").write_text(json.dumps(config, indent=2))
    held = {
        "model.language_model." + name.removeprefix("model.") if name.startswith("model.") else name: tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    held.update(unserved_tensors())
    for name, tensor in (tensors or {}).items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor.contiguous()
    save_file(held, target / "model.safetensors", metadata={"format": "pt"})
    return target
