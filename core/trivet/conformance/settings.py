"""Torch's settings of a process before and after a family is imported, loaded and served there."""

from __future__ import annotations

import contextlib
import hashlib
import io
from pathlib import Path
from typing import Any

import torch
import torch.utils._device  # nothing else loads it before a default device is set

from trivet.conformance.kit import Asked, Kit
from trivet.plugin.manager import PluginManager
from trivet.sampling.params import Sampling

UNLIKELY_THREADS = 3
"""What a family that sets the number of threads would hardly set."""

FUNCTIONS = (
    "torch.get_num_threads",
    "torch.get_num_interop_threads",
    "torch.get_default_dtype",
    "torch.is_grad_enabled",
    "torch.is_inference_mode_enabled",
    "torch.is_anomaly_enabled",
    "torch.get_float32_matmul_precision",
    "torch.are_deterministic_algorithms_enabled",
    "torch.backends.cuda.flash_sdp_enabled",
    "torch.backends.cuda.mem_efficient_sdp_enabled",
    "torch.backends.cuda.math_sdp_enabled",
    "torch.backends.cuda.cudnn_sdp_enabled",
)
FLAGS = (
    "torch.backends.mkldnn.enabled",
    "torch.backends.mkldnn.deterministic",
    "torch.backends.cudnn.enabled",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
    "torch.backends.cudnn.allow_tf32",
    "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
)
"""Settings that can be read where there is no CUDA too."""

UNTOLD = "not told"
"""By a torch that has no such setting, or refuses because one that overlaps with it was made."""


def before_and_after(model_type: str, directory: Path) -> dict[str, Any]:
    """Load the checkpoint in `directory` on the CPU and serve a few steps of it, in a process that has done neither.

    Returns:
        ``before`` the plugin is imported, ``loaded`` and ``after`` some steps: what `settings` says then; ``printed``:
        what went to standard output meanwhile.
    """
    PluginManager.discover().attention_backends()  # what importing these does is not the family's
    torch.set_num_threads(UNLIKELY_THREADS)
    found: dict[str, Any] = {"before": settings()}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        with Kit(Asked(model_type)) as kit, kit.benches["cpu"].serve(directory) as served:
            found["loaded"] = settings()
            served.generate([list(range(30))] * 2, Sampling(max_new_tokens=3))
            found["after"] = settings()
    return {**found, "printed": printed.getvalue()}


def settings() -> dict[str, str]:
    """Each setting of torch that a family is to leave alone, by the name under which people know it."""
    smallest = torch.full((1,), 1e-310, dtype=torch.float64, device="cpu")
    return {
        **{f"{name}()": _read(name, call=True) for name in FUNCTIONS},
        **{name: _read(name, call=False) for name in FLAGS},
        # "cpu" can be set too, and is then in the way of whoever sets another device.
        "torch.set_default_device": _read("torch.utils._device.CURRENT_DEVICE", call=False),
        "torch.set_flush_denormal": str(not smallest.mul(1).item()),
        "the state of torch.random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8],
    }


def _read(name: str, *, call: bool) -> str:
    value: Any = torch
    try:
        for part in name.split(".")[1:]:
            value = getattr(value, part)
        return str(value() if call else value)
    except (RuntimeError, AttributeError):
        return UNTOLD
