"""Random weights leave attention nearly even where query and key heads are normed; the gate makes it peaked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from trivet.runtime.runtime import Runtime

SCORE_SPREAD = 2.0
"""Standard deviation of attention scores between drawn heads, which norms with weights around 1 leave at 1."""
NORMED = (".q_norm.weight", ".k_norm.weight")


@torch.inference_mode()
def sharpen(runtime: Runtime) -> int:
    """Widen the norms of query and key heads in place, so that scores spread by `SCORE_SPREAD`; how many there are.

    Without it a page of wrong keys, or a rotation by one position, hardly shows in the logits. Both sides of the gate
    read the same tensors. A constant is added to each weight, which is right for zero-centred norms too.
    """
    engine = runtime._engine
    weights = engine.owned[engine.blueprint.weights.name]
    names = [spec.name for spec in engine.blueprint.weight_map.parameters if spec.parts[0].name.endswith(NORMED)]
    for name in names:
        weights[name].add_(SCORE_SPREAD**0.5 - 1.0)
    return len(names)
