"""A model without arithmetic, so that what is left of a step is the runtime's own work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.config.document import ConfigDocument
from trivet.config.rope import Rope
from trivet.geometry import AttentionGeometry, ModelGeometry
from trivet.plugin.family import ModelFamily
from trivet.plugin.hookspecs import hookimpl
from trivet.plugin.manager import PluginManager
from trivet.weights.map import WeightMap
from trivet.weights.standard import matrix

if TYPE_CHECKING:
    import torch

    from trivet.layers.context import StepContext
    from trivet.layers.parameters import Parameters

MODEL_TYPE = "null"
VOCAB_SIZE = 16
"""Small, so that the sampler has next to nothing to look at."""
HIDDEN_SIZE = 2


class NullModel:
    """Answers with zeros that exist once; attends to nothing and writes no keys."""

    def __init__(self, geometry: ModelGeometry, parameters: Parameters) -> None:
        import torch

        like = parameters["embedding.weight"]
        self._hidden = torch.zeros(1, geometry.hidden_size, dtype=like.dtype, device=like.device)
        self._logits = torch.zeros(1, geometry.vocab_size, dtype=like.dtype, device=like.device)

    def __call__(self, token_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Zeros ``[tokens, hidden_size]``."""
        return self._hidden.expand(token_ids.shape[0], -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Zeros ``[rows, vocab_size]``."""
        return self._logits.expand(hidden.shape[0], -1)


class NullPlugin:
    """Brings the family of the null model."""

    @hookimpl
    def trivet_model_families(self) -> Sequence[ModelFamily]:
        """The one family."""
        return (
            ModelFamily(
                name=MODEL_TYPE,
                model_types=(MODEL_TYPE,),
                read_geometry=_geometry,
                weight_map=_weight_map,
                build=NullModel,
            ),
        )


def null_plugins() -> PluginManager:
    """A plugin manager that knows the null model and nothing else."""
    return PluginManager.of(families={MODEL_TYPE: NullPlugin()})


def write_null_config(directory: Path) -> None:
    """Make `directory` a checkpoint of the null model, to be loaded with random weights."""
    config: dict[str, Any] = {"model_type": MODEL_TYPE}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _geometry(document: ConfigDocument) -> ModelGeometry:
    attention = AttentionGeometry(query_heads=1, kv_heads=1, head_dim=2, rope=Rope(theta=1e4, rotary_dim=2))
    return ModelGeometry(
        model_type=document.model_type,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
        vocab_size=VOCAB_SIZE,
        layers=(attention,),
        norm_eps=1e-6,
        max_positions=2**20,
        tied_embeddings=True,
        dtype="float32",
    )


def _weight_map(geometry: ModelGeometry) -> WeightMap:
    return WeightMap((matrix("embedding.weight", "embedding.weight", geometry.vocab_size, geometry.hidden_size),))
