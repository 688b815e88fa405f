"""Which dtype sums are taken in."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that norms, decays and states of `dtype` inputs are computed in.

    float32 for every dtype that models are served in; float64 for float64, which serves as an oracle.
    """
    return torch.float64 if dtype is torch.float64 else torch.float32
