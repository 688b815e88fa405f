"""Everything here needs a CUDA device and FlashInfer; elsewhere it is skipped with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trivet.attention.flashinfer.library import missing_library

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder, and skip it where it cannot run."""
    reason = "torch sees no CUDA device" if not torch.cuda.is_available() else missing_library()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
