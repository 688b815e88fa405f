"""Qwen3.5: hybrid decoders, Gated DeltaNet layers between full-attention layers. Text only."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.plugin import Capabilities, ModelFamily, StoredOracle, hookimpl, standard_paths
from trivet_qwen35.config import MULTIMODAL, TEXT_ONLY, read_geometry
from trivet_qwen35.tiny import TINY_CONFIGS
from trivet_qwen35.weights import weight_map

FAMILY = ModelFamily(
    name="qwen3.5",
    model_types=(MULTIMODAL, TEXT_ONLY),
    read_geometry=read_geometry,
    weight_map=weight_map,
    build="trivet_qwen35.model:build",
    decode_paths=standard_paths(),
    capabilities=Capabilities(),
    fused_recurrence=True,
    tiny_configs=TINY_CONFIGS,
    oracle=StoredOracle("trivet_qwen35:oracle.safetensors"),
)


class Qwen35Plugin:
    """What the entry points ``qwen3_5`` and ``qwen3_5_text`` name."""

    @hookimpl
    def trivet_model_families(self) -> Sequence[ModelFamily]:
        """The one family that this plugin brings."""
        return (FAMILY,)


plugin = Qwen35Plugin()
