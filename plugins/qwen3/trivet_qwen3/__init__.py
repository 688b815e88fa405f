"""Qwen3: dense decoders with grouped-query attention and RMS norms over query and key heads."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.plugin import Capabilities, ModelFamily, StoredOracle, hookimpl, standard_paths
from trivet_qwen3.config import read_geometry
from trivet_qwen3.tiny import TINY_CONFIGS
from trivet_qwen3.weights import weight_map

FAMILY = ModelFamily(
    name="qwen3",
    model_types=("qwen3",),
    read_geometry=read_geometry,
    weight_map=weight_map,
    build="trivet_qwen3.model:build",
    decode_paths=standard_paths(),
    capabilities=Capabilities(),
    tiny_configs=TINY_CONFIGS,
    oracle=StoredOracle("trivet_qwen3:oracle.safetensors"),
)


class Qwen3Plugin:
    """What the entry point ``qwen3`` names."""

    @hookimpl
    def trivet_model_families(self) -> Sequence[ModelFamily]:
        """The one family that this plugin brings."""
        return (FAMILY,)


plugin = Qwen3Plugin()
