"""Which kernels are going to serve, fused ones or torch's operations, said before any is imported.

The bound on temporaries, the captured prompts and the refusals of the pinned policy go by what is said here.
"""

from __future__ import annotations

from collections.abc import Iterable

from trivet.capacity.device import DeviceProfile
from trivet.geometry import LayerGeometry, RecurrentGeometry
from trivet.installed import missing_triton

FUSED_DTYPES = ("bfloat16", "float16")

MOST_HEAD_WIDTH = 256
"""Of a key or value head of a recurrent layer, in its fused kernels."""

MOST_CHUNKED_KEY_WIDTH = 128
"""Of a key head in the chunk kernels: with wider ones the scan faults or gives wrong numbers (Triton 3.6, H200)."""

MOST_FUSED_TAPS = 16
"""Of a convolution in the fused kernels: they unroll it, and with 70 taps ptxas was at work for minutes (CUDA 13.0)."""


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

    A CUDA device that is not here is supposed to have Triton.
    """
    missing = fused_kernels_missing(device, dtype)
    if missing is not None:
        return missing
    reasons = (beyond_chunk_kernels(layer) for layer in layers if isinstance(layer, RecurrentGeometry))
    return next(filter(None, reasons), None)


def beyond_chunk_kernels(layer: RecurrentGeometry) -> str | None:
    """Why the chunk kernels do not take `layer`, or None if they do."""
    widths = (("key", layer.key_dim, MOST_CHUNKED_KEY_WIDTH), ("value", layer.value_dim, MOST_HEAD_WIDTH))
    for what, width, most in widths:
        if width > most:
            return f"they take {what} heads of up to {most} elements, and the model has some of {width}"
    if layer.conv_kernel > MOST_FUSED_TAPS:
        return f"they take convolutions of up to {MOST_FUSED_TAPS} taps, and the model has some of {layer.conv_kernel}"
    return None
