"""Which kernels are going to serve, fused ones or torch's operations, said before any is imported.

The bound on temporaries, the captured prompts and the refusals of the pinned policy go by what is said here.
"""

from __future__ import annotations

from collections.abc import Iterable

from trivet.capacity.device import DeviceProfile
from trivet.geometry import LayerGeometry, RecurrentGeometry
from trivet.installed import missing_distribution, missing_triton

FUSED_DTYPES = ("bfloat16", "float16")

CHUNK_DISTRIBUTION = "fla-core"
CHUNK_TESTED_VERSION = "0.6.0"
"""The one version whose kernels `trivet.ops.fused.delta_chunks` launches."""

MOST_HEAD_WIDTH = 256
"""Of a key or value head of a recurrent layer, in its fused kernels."""


def fused_kernels_missing(device: DeviceProfile, dtype: str) -> str | None:
    """Why fused kernels do not serve `dtype` on `device`, or None if they do.

    A CUDA device that is not here is supposed to have Triton.
    """
    if device.kind != "cuda":
        return f"they run on CUDA devices, and {device.name} is none"
    if dtype not in FUSED_DTYPES:
        return f"they compute in {' or '.join(FUSED_DTYPES)}, and the model is to be served in {dtype}"
    return missing_triton() if device.present else None


def chunk_kernels_missing(device: DeviceProfile, dtype: str, layers: Iterable[LayerGeometry]) -> str | None:
    """Why the chunk kernels do not serve all recurrent ones of `layers`, or None if they do.

    A CUDA device that is not here is supposed to have the libraries.
    """
    missing = fused_kernels_missing(device, dtype)
    if missing is None and device.present:
        missing = missing_fla()
    if missing is not None:
        return missing
    widths = [max(layer.key_dim, layer.value_dim) for layer in layers if isinstance(layer, RecurrentGeometry)]
    widest = max(widths, default=0)
    if widest > MOST_HEAD_WIDTH:
        return f"they take heads of up to {MOST_HEAD_WIDTH} elements, and the model has some of {widest}"
    return None


def missing_fla() -> str | None:
    """Why the library of the chunk kernels cannot be used on this machine, or None if it can."""
    return missing_distribution("fla", CHUNK_DISTRIBUTION, CHUNK_TESTED_VERSION)
