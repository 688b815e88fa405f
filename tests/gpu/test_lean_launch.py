"""Kept launches of the fused kernels give the bits of Triton's own, in graphs too, and refuse what those refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = (1, 15, 16, 17)
ALIGNED, MISALIGNED = 0, 1


def drawn(rows: int, width: int, offset: int) -> Tensor:
    """Numbers that begin `offset` elements behind where torch allocates."""
    values = torch.randn(rows * width + offset, generator=torch.Generator().manual_seed(rows), dtype=torch.float32)
    return values.to(torch.bfloat16).to(DEVICE)[offset:].view(rows, width)


def normed(x: Tensor) -> Tensor:
    from trivet.ops.fused import norm

    return norm.rms_norm(x, x[0].contiguous(), 1e-6)


def normed_columns(x: Tensor) -> Tensor:
    from trivet.ops.fused import norm

    return norm.rms_norm(x[:, :1], x[0, :1].contiguous(), 1e-6)


def activated(x: Tensor) -> Tensor:
    from trivet.ops.fused import activation

    return activation.silu_and_mul(x)


def gated(x: Tensor) -> Tensor:
    from trivet.ops.fused import gated_norm

    heads = x.view(len(x), 2, -1)
    return gated_norm.gated_rms_norm(heads, heads.flip(1), heads[0, 0].contiguous(), 1e-6)


def multiplied(x: Tensor) -> Tensor:
    from trivet.ops.fused import pinned

    return pinned.PinnedMatmul(drawn(48, x.shape[1], ALIGNED))(x)


def rotated(x: Tensor) -> Tensor:
    """Queries, keys and values of a step, keys and values as they lie in the pages."""
    from trivet.ops.fused import heads

    rows, head_dim, page = len(x), x.shape[1] // 4, 16
    rotary_dim = head_dim // 2 * 2
    count = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    indptr = torch.tensor([0, -(-rows // page)], dtype=torch.int32, device=DEVICE)
    table = torch.cos(count[:, None] * x[:1, :rotary_dim].float())
    keys, values = torch.zeros(2, 4, page, 1, head_dim, dtype=x.dtype, device=DEVICE)
    places = (count * 0, count, indptr, count)
    norms = (x[0, :head_dim].contiguous(), x[0, -head_dim:].contiguous(), 1e-6, False)
    query = heads.norm_rotate_append(x, 2, norms, table, rotary_dim, places, keys, values)
    return torch.cat([query.flatten(), keys.flatten(), values.flatten()])


KERNELS = {
    normed: ("norm", "_rms_norm_kernel"),
    normed_columns: ("norm", "_rms_norm_kernel"),
    activated: ("activation", "_silu_and_mul_kernel"),
    gated: ("gated_norm", "_gated_rms_norm_kernel"),
    multiplied: ("pinned", "_pinned_kernel"),
    rotated: ("heads", "_norm_rotate_append_kernel"),
}


@pytest.mark.parametrize("call", list(KERNELS), ids=lambda call: str(call.__name__))
@pytest.mark.parametrize("width", [64, 100])
def test_results_have_the_bits_of_tritons_own_launches(
    call: Callable[[Tensor], Tensor], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import import_module

    from trivet.launch import LeanKernel

    module, name = import_module(f"trivet.ops.fused.{KERNELS[call][0]}"), KERNELS[call][1]
    kernel: Any = getattr(module, name)
    if not isinstance(kernel, LeanKernel):
        pytest.skip("kernels are interpreted, or Triton is of a version whose launches are not kept")
    inputs = [drawn(rows, width, offset) for offset in (ALIGNED, MISALIGNED) for rows in ROWS]
    for x in inputs:
        call(x)
    kept = [call(x) for x in reversed(inputs)]
    monkeypatch.setattr(module, name, kernel.plain)
    plain = [call(x) for x in reversed(inputs)]
    assert all(torch.isfinite(each).all() for each in plain)
    assert all(torch.equal(one, other) for one, other in zip(kept, plain, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are captured on a device")
def test_a_kept_launch_is_captured_and_replayed() -> None:
    x = drawn(16, 64, ALIGNED)
    for _ in range(2):
        activated(normed(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = activated(normed(x))
    x.copy_(drawn(16, 64, ALIGNED).flip(0))
    graph.replay()
    assert torch.equal(captured, activated(normed(x)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_each_device_launches_its_own_kernel() -> None:
    found = []
    for index in (0, 1, 0, 1):
        with torch.cuda.device(index):
            found.append(activated(drawn(16, 64, ALIGNED).to(f"cuda:{index}")).cpu())
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.skipif(DEVICE == "cpu", reason="a tensor that is not on the device")
def test_a_tensor_in_host_memory_is_refused_and_the_device_goes_on() -> None:
    from trivet.ops.fused import norm

    x = drawn(16, 64, ALIGNED)
    before = normed(x)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        norm.rms_norm(x, x[0].cpu(), 1e-6)
    assert torch.equal(normed(x), before)
