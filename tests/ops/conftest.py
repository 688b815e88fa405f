"""Fresh inputs for every test."""

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_inputs() -> None:
    """Inputs differ from run to run; the seed is shown with a failure."""
    print(f"torch seed: {torch.seed()}")
