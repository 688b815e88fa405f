"""Paged contexts on a CUDA device, owners over them, and float32 attention to compare with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from attrs import frozen
from tests.support.attention import geometry
from tests.support.flashinfer import flashinfer_capacity
from torch import Tensor

from trivet.attention import PathRequest, StepBatch, select_path
from trivet.attention.flashinfer.kinds import DecodeKernel, FewRows, LongChunks
from trivet.attention.flashinfer.owner import FlashInferOwner
from trivet.attention.flashinfer.paths import FlashInferPath
from trivet.attention.flashinfer.speeds import HeadDimSpeeds, SpeedTable
from trivet.attention.paths import standard_paths
from trivet.capacity import DeviceProfile, Limits, PlanCapacity
from trivet.dtypes import as_torch

COMPILED, PAGED_PREFILL, SPLIT_KV = DecodeKernel.COMPILED, DecodeKernel.PAGED_PREFILL, DecodeKernel.SPLIT_KV
QUERY_SCALE = 2.0
"""Makes attention peaked, so that a wrong page or position shows."""
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 3e-3}

FEW_ROWS = [
    (group, head_dim)
    for head_dim, speeds in SpeedTable.committed().devices["h200"].items()
    for group in speeds.few_rows
]
"""Group sizes and head dims whose steps of few rows are committed to the split-KV kernel."""


def device_here() -> DeviceProfile:
    """The profile of this machine's device."""
    return DeviceProfile.of_cuda(torch.cuda.current_device())


def untimed_path(decode: DecodeKernel, hopper_from: int | None = None) -> FlashInferPath:
    """A path whatever was measured; chunks of `hopper_from` tokens or more run on the Hopper kernel."""
    one = HeadDimSpeeds((), {}, None if hopper_from is None else LongChunks(hopper_from, hopper_from))
    name = device_here().name.lower()
    return FlashInferPath(decode, SpeedTable({name: dict.fromkeys((64, 128, 256), one)}), forced=True)


def served_path(group: int, kv_heads: int, head_dim: int, page_size: int = 16) -> FlashInferPath:
    """The path that serves bfloat16 on this machine's device, with what the committed table says of it."""
    need = PathRequest(geometry(group, kv_heads, head_dim), device_here(), "bfloat16", "tuned", page_size)
    path = select_path(standard_paths(), need).path
    assert isinstance(path, FlashInferPath)
    return path


def few_rows_here(group: int, head_dim: int) -> tuple[FewRows, ...]:
    """What the committed table says of steps of few rows on this machine's device; skips the test if nothing."""
    speeds = SpeedTable.committed().of(device_here(), head_dim)
    few = speeds.few_rows.get(group, ()) if speeds is not None else ()
    if not few:
        pytest.skip(f"the speed table says nothing of few rows on {device_here().name} at this shape")
    return few


def capacity_here(
    path: FlashInferPath, group: int, kv_heads: int, head_dim: int, limits: Limits, dtype: str = "bfloat16"
) -> PlanCapacity:
    """A capacity for this machine's device."""
    return flashinfer_capacity(geometry(group, kv_heads, head_dim), limits, path, device_here(), dtype)


def bound_owner(path: FlashInferPath, capacity: PlanCapacity) -> FlashInferOwner:
    """An owner of `path` over buffers of its own, on the real kernels."""
    owner = path.bind(capacity, path.layout(capacity).allocate("cuda"))
    assert isinstance(owner, FlashInferOwner)
    return owner


@frozen(eq=False)
class PagedRows:
    """Rows of a step with random contexts, and the cache that holds what earlier steps wrote.

    Attributes:
        batch: the step.
        keys, values: whole contexts, row by row, ``[length, kv_heads, head_dim]``; rows that share pages share tokens.
        cache_keys, cache_values: ``[pages + 1, page_size, kv_heads, head_dim]``; NaN wherever no context lies.
        query: ``[tokens, query_heads, head_dim]``.
    """

    batch: StepBatch
    keys: list[Tensor]
    values: list[Tensor]
    cache_keys: Tensor
    cache_values: Tensor
    query: Tensor

    @classmethod
    def drawn(
        cls,
        capacity: PlanCapacity,
        query_lengths: Sequence[int],
        kv_lengths: Sequence[int],
        decode_rows: int,
        seed: int = 0,
        *,
        pages: list[list[int]] | None = None,
        pool_pages: int | None = None,
        outside: float = float("nan"),
    ) -> PagedRows:
        """Draw contexts. Pages are scattered over the pool unless `pages` lists them."""
        generator = torch.Generator("cuda").manual_seed(seed)
        page_size, dtype = capacity.limits.page_size, as_torch(capacity.dtype or "bfloat16")
        counts = [-(-length // page_size) for length in kv_lengths]
        if pages is None:
            scattered = np.random.default_rng(seed).permutation(sum(counts) + 7)
            edges = np.concatenate([[0], np.cumsum(counts)])
            pages = [scattered[first:last].tolist() for first, last in itertools.pairwise(edges)]
        pool = pool_pages or max(max(row, default=0) for row in pages) + 8
        shape = (pool + 1, page_size, capacity.kv_heads, capacity.head_dim)
        drawn = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(2)]
        caches = [torch.full_like(source, outside) for source in drawn]
        contexts: list[list[Tensor]] = [[], []]
        for held, length, count in zip(pages, kv_lengths, query_lengths, strict=True):
            listed = torch.tensor(held, device="cuda", dtype=torch.int64)
            places = torch.arange(length, device="cuda")
            slots = (listed[places // page_size], places % page_size)
            earlier = tuple(part[: length - count] for part in slots)
            for source, cache, rows in zip(drawn, caches, contexts, strict=True):
                cache[earlier] = source[earlier]
                rows.append(source[slots])
        tokens = sum(query_lengths)
        query = torch.randn(tokens, capacity.query_heads, capacity.head_dim, generator=generator, device="cuda")
        batch = StepBatch(
            query_lengths,
            kv_lengths,
            np.concatenate([[0], np.cumsum(counts)]),
            np.concatenate([np.asarray(row, dtype=np.int32) for row in pages]),
            decode_rows,
            capacity.query_heads,
            capacity.kv_heads,
        )
        return cls(batch, *contexts, *caches, (query * QUERY_SCALE).to(dtype))

    @property
    def new(self) -> tuple[Tensor, Tensor]:
        """The keys and values that the step appends."""
        starts = (self.batch.kv_lengths - self.batch.query_lengths).tolist()
        return (
            torch.cat([key[start:] for key, start in zip(self.keys, starts, strict=True)]),
            torch.cat([value[start:] for value, start in zip(self.values, starts, strict=True)]),
        )

    def attended_by(self, owner: FlashInferOwner) -> Tensor:
        """Update, append and attend."""
        owner.update(self.batch)
        owner.append(*self.new, self.cache_keys, self.cache_values)
        return owner.attend(self.query, self.cache_keys, self.cache_values)

    def expected(self) -> Tensor:
        """Causal attention in float32, ``[tokens, query_heads, head_dim]``."""
        outputs, first = [], 0
        group = self.query.shape[1] // self.keys[0].shape[1]
        for row, count in enumerate(self.batch.query_lengths.tolist()):
            key, value = (
                context[row].float().transpose(0, 1).repeat_interleave(group, 0) for context in (self.keys, self.values)
            )
            query = self.query[first : first + count].float().transpose(0, 1)
            length = key.shape[1]
            scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
            places = torch.arange(length, device="cuda")
            scores.masked_fill_(places[None] > places[length - count :, None], -torch.inf)
            outputs.append((scores.softmax(-1) @ value).transpose(0, 1))
            first += count
        return torch.cat(outputs)

    def worst_error(self, out: Tensor) -> float:
        """The largest error of any token and head, relative to the largest value of that token and head."""
        expected = self.expected()
        return float(((out.float() - expected).abs().amax(-1) / expected.abs().amax(-1)).max())

    def assert_right(self, out: Tensor) -> float:
        """Finite and within the dtype's rounding; returns the worst error."""
        assert bool(out.isfinite().all()), "something outside the rows' contexts was read"
        error = self.worst_error(out)
        assert error <= TOLERANCE[out.dtype], f"worst relative error {error:.4f}"
        return error
