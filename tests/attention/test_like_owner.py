"""A like owner over new buffers, which is what a fresh plan costs: nothing is loaded, run or asked for anew."""

from __future__ import annotations

import pytest
import torch
from tests.attention.test_flashinfer_owner import by_path, mixed, small
from tests.support.attention import Contexts, batch_of, geometry
from tests.support.flashinfer import torch_owner, unpinned

from trivet.attention.flashinfer.paths import FlashInferPath
from trivet.attention.protocol import PlanOwner
from trivet.attention.reference.owner import ReferenceOwner
from trivet.attention.reference.path import STANDARD_TILE
from trivet.capacity import Limits, PlanCapacity
from trivet.errors import ConfigError
from trivet.layout import Buffers


def assert_attends_like(owner: PlanOwner, buffers: Buffers, like: PlanOwner) -> None:
    """`like` attends as `owner` does, on a plan in `buffers` that leaves the plan of `owner` as it is."""
    assert like.buffers is buffers and like.capacity is owner.capacity
    batch = mixed(batch_of(owner.capacity, [1, 1, 5], [9, 17, 8]), 2)
    contexts = Contexts.drawn(owner.capacity, batch, torch.Generator().manual_seed(0))
    query = torch.randn(batch.tokens, owner.capacity.query_heads, owner.capacity.head_dim)
    owner.update(batch)
    like.update(mixed(batch_of(owner.capacity, [1], [3]), 1))
    owner.append(*contexts.new(batch), contexts.cache_keys, contexts.cache_values)
    keys, values = contexts.cache_keys.nan_to_num(), contexts.cache_values.nan_to_num()
    attended = owner.attend(query, keys, values)
    like.update(batch)
    assert torch.equal(like.attend(query, keys, values), attended)
    owner.close()
    assert torch.equal(like.attend(query, keys, values), attended)


@by_path
def test_a_like_owner_attends_from_its_own_buffers_and_asks_the_kernels_for_nothing(
    path: FlashInferPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = torch_owner(small(path), path)
    loaded = (owner._kernels.decode, owner._kernels.chunks, owner._kernels.long_chunks)
    kernels = [kernel for kernel in loaded if kernel is not None]
    for kernel in kernels:
        kernel.asked = None  # one that cannot tell plans the worst steps where it is bound
        monkeypatch.setattr(kernel, "asks", lambda *rows: pytest.fail("asked for its workspace"))
    buffers = unpinned(path.layout(owner.capacity))
    like = owner.like(buffers)
    assert [kernel.served for kernel in kernels] == [[]] * len(kernels)
    assert_attends_like(owner, buffers, like)


@by_path
def test_a_like_owner_over_another_layout_is_refused(path: FlashInferPath) -> None:
    owner = torch_owner(small(path), path)
    layout = path.layout(owner.capacity)
    shorter = layout.with_elements("float_workspace", layout.spec("float_workspace").elements - 1)
    with pytest.raises(ConfigError, match=f"{shorter.total_bytes} bytes.*{layout.total_bytes}"):
        owner.like(unpinned(shorter))


def test_a_like_reference_owner_attends_from_its_own_buffers() -> None:
    owner = ReferenceOwner.allocate(PlanCapacity(geometry(5, 2), Limits(4, 24, 40, 4), STANDARD_TILE))
    buffers = owner.buffers.layout.allocate("cpu")
    assert_attends_like(owner, buffers, owner.like(buffers))
