"""What the owner asks of a kernel library: a plan for some rows, and a run on that plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from trivet.attention.flashinfer.bounds import Workspace

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False)
class HostRows:
    """Rows as a planner reads them, int32 on the host; read before `RowKernel.plan` returns.

    Attributes:
        query_indptr: ``[rows + 1]``, first token of each row, from 0.
        page_indptr: ``[rows + 1]``, where each row's pages start in the step's page list.
        kv_lengths: ``[rows]``.
        tokens: tokens of all rows.
    """

    query_indptr: Tensor
    page_indptr: Tensor
    kv_lengths: Tensor
    tokens: int

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.kv_lengths)


@frozen(eq=False)
class DeviceRows:
    """The same rows as a kernel reads them: int32 views of the plan's buffers on the device.

    Attributes:
        query_indptr: ``[rows + 1]``; unused by kernels that take one token a row.
        page_indptr: ``[rows + 1]``.
        last_page_len: ``[rows]``.
        page_indices: the whole page list.
        token_rows: ``[tokens]``, row of each token, counted from the step's first row.
        positions: ``[tokens]``.
        first_row: where these rows start in the step.
    """

    query_indptr: Tensor
    page_indptr: Tensor
    last_page_len: Tensor
    page_indices: Tensor
    token_rows: Tensor
    positions: Tensor
    first_row: int


@frozen(eq=False)
class PlanSpaces:
    """Where a plan lives, uint8.

    Attributes:
        floats: float workspace on the device.
        ints: int workspace on the device; zeros when the plan's buffers are bound.
        staged: pinned memory from which the int workspace is copied, in stream order.
    """

    floats: Tensor
    ints: Tensor
    staged: Tensor


@frozen(eq=False)
class RowPlan:
    """What a planner returned.

    Attributes:
        info: as the library's run function takes it.
        key: grid, split and workspace offsets: all that a CUDA graph freezes of the plan.
    """

    info: Any
    key: tuple[int, ...]


class RowKernel(Protocol):
    """One compiled attention kernel and its planner."""

    def plan(self, rows: HostRows, spaces: PlanSpaces) -> RowPlan:
        """Plan `rows` in place. Allocates nothing on the device and does not wait for it."""

    def asks(self, rows: HostRows, spaces: PlanSpaces) -> Workspace | None:
        """The workspace that planning `rows` would take; None if the library has no way to tell."""

    def run(
        self,
        plan: RowPlan,
        rows: DeviceRows,
        spaces: PlanSpaces,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
    ) -> None:
        """Attend: ``query`` and ``out [tokens, query_heads, head_dim]``, the cache as in `PlanOwner.append`."""


class AppendKernel(Protocol):
    """Writes new keys and values to their pages."""

    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        batch_indices: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: DeviceRows,
    ) -> None:
        """Token *i* goes to position ``positions[i]`` of row ``batch_indices[i]``."""


@frozen(eq=False)
class Kernels:
    """The compiled kernels of one plan.

    Attributes:
        decode: serves decode rows.
        chunks: serves chunks of any length.
        long_chunks: serves chunks that are long on average; None where `chunks` serves all.
        append: writes keys and values.
        few: what serves steps of few decode rows instead of `decode`, each up to a number of rows; ascending.
    """

    decode: RowKernel
    chunks: RowKernel
    long_chunks: RowKernel | None
    append: AppendKernel
    few: tuple[tuple[int, RowKernel], ...] = ()
