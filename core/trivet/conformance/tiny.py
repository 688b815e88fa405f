"""Tiny checkpoints with random weights, made from the configs that a family declares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from trivet.config.document import ConfigDocument
from trivet.errors import ConfigError
from trivet.geometry import ModelGeometry
from trivet.plugin.family import ModelFamily
from trivet.weights.map import ParameterSpec, WeightMap

if TYPE_CHECKING:
    import torch

WEIGHTS_SEED = 20
MOST_ELEMENTS = 4_000_000
"""A tiny model beyond this makes conformance slow; 16 MB in float32."""


@frozen(eq=False)
class TinyModel:
    """A checkpoint on disk and what was written into it.

    Attributes:
        name: of its config.
        config: its config.json.
        directory: where it lies.
        geometry: as the family reads the config.
        weight_map: as the family gives it.
        tensors: every tensor by its name on disk, float32 on the CPU.
    """

    name: str
    config: Mapping[str, object]
    directory: Path
    geometry: ModelGeometry
    weight_map: WeightMap
    tensors: Mapping[str, torch.Tensor]

    @property
    def vocab_size(self) -> int:
        """Rows of the vocabulary."""
        return self.geometry.vocab_size


def disk_map(weight_map: WeightMap) -> WeightMap:
    """A map with one parameter for each tensor on disk.

    Weights are drawn and written by it, so that they do not depend on how the family fuses tensors into parameters:
    a family that joins or names them wrongly reads other weights than its oracle.
    """
    return WeightMap(
        tuple(
            ParameterSpec(part.name, part.shape, (part,), spec.dtype, spec.initial)
            for spec in weight_map.parameters
            for part in spec.parts
        )
    )


def draw_tensors(weight_map: WeightMap, seed: int = WEIGHTS_SEED) -> dict[str, torch.Tensor]:
    """Every tensor on disk by name, in float32, drawn by `trivet.weights.random`."""
    from trivet.weights.random import fill_random

    flat = disk_map(weight_map)
    return fill_random(flat, flat.layout("float32").allocate("cpu"), seed)


def read_config(family: ModelFamily, config: Mapping[str, object]) -> tuple[ModelGeometry, WeightMap]:
    """Geometry and weight map of a tiny config.

    Raises:
        ConfigError: the model is not tiny, or what the family raises.
    """
    geometry = family.read_geometry(ConfigDocument(config))
    weight_map = family.weight_map(geometry)
    elements = sum(spec.elements for spec in weight_map.parameters)
    if elements > MOST_ELEMENTS:
        raise ConfigError(
            f"a tiny config of family {family.name!r} has {elements} weights, expected at most {MOST_ELEMENTS}: "
            "lower its sizes"
        )
    return geometry, weight_map


def make_tiny(
    family: ModelFamily,
    name: str,
    config: Mapping[str, object],
    directory: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    shards: int = 1,
) -> TinyModel:
    """Write a tiny checkpoint into `directory`.

    Args:
        tensors: what to write; None draws it.
        shards: files to spread it over.
    """
    from trivet.weights.save import write_checkpoint

    geometry, weight_map = read_config(family, config)
    if tensors is None:
        tensors = draw_tensors(weight_map)
    write_checkpoint(directory, config, disk_map(weight_map), tensors, "float32", shards)
    return TinyModel(name, config, directory, geometry, weight_map, tensors)


def with_tied_embeddings(config: Mapping[str, object], tied: bool) -> dict[str, object]:
    """`config` with ``tie_word_embeddings`` stated where the language model's config stands."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return {**config, "text_config": {**text, "tie_word_embeddings": tied}}
    return {**config, "tie_word_embeddings": tied}
