"""Triton kernels without a GPU: its interpreter runs them in numpy, if ``TRITON_INTERPRET=1`` is in the environment."""

from __future__ import annotations

import os
from importlib import util
from typing import Any

import pytest


def missing_interpreter() -> str | None:
    """Why kernels cannot be interpreted in this process, or None if they can."""
    if util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "kernels are interpreted only where TRITON_INTERPRET=1 is in the environment"
    return None


def serve_as_loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let interpreted scalars bound loops: they are arrays of one element, which numpy 2.4 takes for no index."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
