"""What FlashInfer has on this machine's CUDA device. Imports the library when asked, not before."""

from __future__ import annotations

from trivet.attention.flashinfer.kinds import KernelChoice
from trivet.attention.flashinfer.library import TESTED_VERSION
from trivet.dtypes import as_torch

CANDIDATE_GROUPS = range(1, 17)


def decode_compiles(dtype: str, head_dim: int, group: int) -> bool:
    """Whether the decode kernel is compiled for `group`: its planner is asked."""
    from trivet.attention.flashinfer import kernels

    return kernels.decode_compiles(as_torch(dtype), head_dim, group)


def compiled_groups(dtype: str, head_dim: int) -> tuple[int, ...]:
    """The group sizes up to 16 that the decode kernel is compiled for, for reports and the committed table."""
    return tuple(group for group in CANDIDATE_GROUPS if decode_compiles(dtype, head_dim, group))


def missing_kernels(dtype: str, head_dim: int, choice: KernelChoice) -> str | None:
    """Why the kernels of `choice` cannot be had here, or None if they are built already or can be built."""
    from trivet.attention.flashinfer import kernels

    wanted = kernels.specs(as_torch(dtype), head_dim, choice)
    unbuilt = [spec.name for spec in wanted if not spec.is_compiled]
    if not unbuilt or kernels.can_compile():
        return None
    return (
        f"FlashInfer {TESTED_VERSION} has not built {', '.join(unbuilt)} yet, and this machine has no CUDA compiler "
        "(nvcc and ninja) to build with"
    )
