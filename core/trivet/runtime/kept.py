"""What a model keeps beside the ledger's lines: next to nothing, since no line counts it."""

from __future__ import annotations

import gc

from trivet.dtypes import FLOAT32_BYTES, item_bytes
from trivet.errors import PluginError
from trivet.reservation import size_text
from trivet.runtime.meter import StorageMeter
from trivet.weights.map import WeightMap

TABLES_BYTES = 4096
"""Scalars and short tables, such as the slopes or the frequencies of heads."""

KEPT_SHARE = 256
"""A table by position is less than this part of a published model's weights, and a copy of one layer's is more. The
ledger may miss by a hundredth."""


def most_kept_bytes(weight_map: WeightMap) -> int:
    """What a model may keep beside the parameters that it is given.

    Every vector of the weight map once more in float32, since norms may be kept with one added and decays as rates;
    the `KEPT_SHARE`-th part of the weights in 16 bits; and `TABLES_BYTES`. The families that ship and the template keep
    nothing on a CPU, and on CUDA the shared products count arrivals in an int32 for each tile, a tenth of this.
    """
    vectors = sum(spec.elements for spec in weight_map.parameters if len(spec.shape) == 1)
    weights_bytes = item_bytes("bfloat16") * sum(spec.elements for spec in weight_map.parameters)
    return vectors * FLOAT32_BYTES + weights_bytes // KEPT_SHARE + TABLES_BYTES


def require_little_kept(family_name: str, weight_map: WeightMap, built: StorageMeter) -> None:
    """Hold what is alive of a model's build against `most_kept_bytes`.

    Args:
        built: a meter that the build was run under.

    Raises:
        PluginError: it is more.
    """
    most_bytes = most_kept_bytes(weight_map)
    if built.live_bytes > most_bytes:
        gc.collect()  # what only cycles hold is not kept
    if built.live_bytes > most_bytes:
        raise PluginError(
            f"model family {family_name!r}: its build keeps {size_text(built.live_bytes)} that are no part of the "
            f"parameters it was given, which the memory ledger does not count; expected at most "
            f"{size_text(most_bytes)}, the vectors of the weight map in float32 and some tables. Keep the tensors of "
            "Parameters themselves, or views of them: a clone, a cast or a transposed copy is one more; what has to "
            "lie otherwise is a parameter of the weight map, with its parts and its dtype"
        )
