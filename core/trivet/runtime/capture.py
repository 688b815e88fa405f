"""What captured steps have in common: one pool of memory, and plans of decode rows with padding behind them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from attrs import frozen

from trivet.attention import PlanOwner, StepBatch
from trivet.errors import ConfigError, MemoryBudgetError
from trivet.geometry import AttentionGeometry
from trivet.reservation import GRAPHS_DRIVER_LINE, GRAPHS_LINE, MemoryLedger, size_text

logger = logging.getLogger("trivet.capture")

WARM_UP_RUNS = 2
"""Eager runs before a capture: what libraries allocate or compile on first use must not be captured."""


@runtime_checkable
class CapturedOwner(Protocol):
    """A plan owner whose decode steps can be captured: it remembers what each graph was planned with."""

    def note_capture(self) -> None:
        """A graph of the plan in place was captured; from now on an `update` that plans otherwise raises."""


@frozen
class Taken:
    """Memory of a device that is taken.

    Attributes:
        pool_bytes: by torch's allocator.
        driver_bytes: by whatever else.
    """

    pool_bytes: int
    driver_bytes: int

    @classmethod
    def on(cls, device: torch.device) -> Taken:
        """What is taken now."""
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        pool_bytes = torch.cuda.memory_reserved(device)
        return cls(pool_bytes, total_bytes - free_bytes - pool_bytes)

    def since(self, before: Taken) -> Taken:
        """What was taken since `before`."""
        return Taken(self.pool_bytes - before.pool_bytes, self.driver_bytes - before.driver_bytes)

    def check(self, ledger: MemoryLedger) -> None:
        """Hold what captured steps took against the ledger's lines for it.

        The pool is this process's own, and more of it than planned is an error. The driver only says what all processes
        hold together: one that took memory meanwhile is in `driver_bytes`, and for that nobody's runtime should fail to
        load. So that part is told as a warning.

        Raises:
            MemoryBudgetError: the pool takes more than its line.
        """
        pool, driver = ledger.line(GRAPHS_LINE).bytes, ledger.line(GRAPHS_DRIVER_LINE).bytes
        if self.pool_bytes > pool:
            raise MemoryBudgetError(
                f"captured steps take {size_text(self.pool_bytes)}, more than the {size_text(pool)} that the ledger "
                "has for them: use cuda_graphs=False, and report these numbers"
            )
        if self.driver_bytes > driver:
            logger.warning(
                "while steps were captured the device lost %s outside torch, more than the %s that the ledger has for "
                "the driver's part of them: another process took memory meanwhile, or, if there is none, the bound is "
                "too small; lower memory_fraction, and report these numbers",
                size_text(self.driver_bytes),
                size_text(driver),
            )


class GraphPool:
    """Captures graphs into one pool of memory. Larger steps are to be captured before smaller ones, which fit in then.

    Args:
        device: of what is captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._before = Taken.on(device)
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def captured(self, body: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A graph of what `body` queues, and the tensor that it returns."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
            out = body()
        return graph, out

    def taken(self) -> Taken:
        """What was taken of the device's memory since this was made."""
        return Taken.on(self._device).since(self._before)


class CapturedPlans:
    """The plans of decode rows that captured steps attend by.

    Padding rows have one token on the padding page.

    Args:
        owners: of the plans.
        padding_page: a page that no request is given.

    Raises:
        ConfigError: an owner's decode steps cannot be captured.
    """

    def __init__(self, owners: Mapping[AttentionGeometry, PlanOwner], padding_page: int) -> None:
        for attention, owner in owners.items():
            if not isinstance(owner, CapturedOwner):
                raise ConfigError(
                    f"the plan owner of {attention.label} has no note_capture: its decode steps cannot be captured in "
                    "CUDA graphs; use cuda_graphs=False"
                )
        self._owners = owners
        self._padding_page = padding_page

    def update(self, kv_lengths: np.ndarray, page_indptr: np.ndarray, page_indices: np.ndarray, rows: int) -> None:
        """Update every owner to decode rows of these contexts, and padding rows behind them, `rows` in all."""
        padding = rows - len(kv_lengths)
        if padding:
            indptr = np.arange(page_indptr[-1] + 1, page_indptr[-1] + 1 + padding, dtype=np.int32)
            page_indptr = np.concatenate((page_indptr, indptr))
            page_indices = padded(page_indices, padding, self._padding_page)
            kv_lengths = padded(kv_lengths, padding, 1)
        for attention, owner in self._owners.items():
            owner.update(
                StepBatch(
                    query_lengths=np.ones(rows, dtype=np.int32),
                    kv_lengths=kv_lengths,
                    page_indptr=page_indptr,
                    page_indices=page_indices,
                    decode_rows=rows,
                    query_heads=attention.query_heads,
                    kv_heads=attention.kv_heads,
                )
            )

    def update_to_padding(self, rows: int) -> None:
        """Update every owner to padding rows alone, for a capture."""
        nothing = np.zeros(0, dtype=np.int32)
        self.update(nothing, np.zeros(1, dtype=np.int32), nothing, rows)

    def note_capture(self) -> None:
        """Let every owner remember that a graph was captured on the plan in place."""
        for owner in self._owners.values():
            assert isinstance(owner, CapturedOwner)
            owner.note_capture()


def padded(values: np.ndarray, padding: int, value: int) -> np.ndarray:
    """`values` with `padding` times `value` behind them."""
    return np.concatenate((values, np.full(padding, value, dtype=values.dtype))) if padding else values
