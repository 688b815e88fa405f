"""Writing a checkpoint as the loader reads it: for tests, the conformance kit and tiny models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trivet.config.document import CONFIG_FILE
from trivet.dtypes import as_torch
from trivet.errors import ConfigError
from trivet.weights.checkpoint import INDEX_FILE, SINGLE_FILE
from trivet.weights.map import WeightMap

if TYPE_CHECKING:
    import torch


def write_checkpoint(
    directory: Path | str,
    config: Mapping[str, object],
    weight_map: WeightMap,
    parameters: Mapping[str, torch.Tensor],
    dtype: str,
    shards: int = 1,
) -> None:
    """Write config.json and safetensors such that loading them with `weight_map` gives back `parameters`.

    Fused parameters are split into their parts again. Tensors are stored in `dtype`, except those that their
    spec keeps in a dtype of its own. With more than one of `shards`, an index is written beside them. The
    directory is made if it is not there; all tensors of one shard are held in memory at once.

    Raises:
        ConfigError: fewer than one shard, or more shards than tensors.
    """
    import torch
    from safetensors.torch import save_file

    placed = [(spec, part, first) for spec in weight_map.parameters for part, first in spec.placed()]
    if not 1 <= shards <= len(placed):
        raise ConfigError(f"{shards} shards for {len(placed)} tensors: expected from 1 to {len(placed)}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    files: dict[str, str] = {}
    total_bytes = 0
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else SINGLE_FILE
        tensors: dict[str, torch.Tensor] = {}
        for spec, part, first in placed[shard * len(placed) // shards : (shard + 1) * len(placed) // shards]:
            rows = parameters[spec.name].detach()[first : first + spec.part_rows(part)]
            # A copy of its own, since safetensors refuses tensors that share a storage.
            tensors[part.name] = torch.empty(part.shape, dtype=as_torch(spec.dtype or dtype))
            tensors[part.name].copy_(rows.reshape(part.shape))
            files[part.name] = file
            total_bytes += tensors[part.name].nbytes
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if shards > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
