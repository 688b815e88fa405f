"""FlashInfer's compiled plan and run functions, called directly. The only module that imports the library.

Its wrapper classes allocate workspaces of their own and copy index arrays in their own way; the functions under
them take every buffer from the caller. Their argument lists are those of `csrc/batch_decode_jit_binding.cu`,
`csrc/batch_prefill_jit_binding.cu`, `csrc/batch_prefill_sm90_jit_binding.cu` and `csrc/flashinfer_page_binding.cu` of
the one version that `trivet.attention.flashinfer.library` names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from flashinfer.jit.attention import modules
from flashinfer.jit.cpp_ext import get_cuda_path
from flashinfer.jit.page import gen_page_module

from trivet.attention.flashinfer.bounds import Workspace
from trivet.attention.flashinfer.kinds import DecodeKernel, FewRows, KernelChoice
from trivet.attention.flashinfer.protocol import (
    AppendKernel,
    DeviceRows,
    HostRows,
    Kernels,
    PlanSpaces,
    RowKernel,
    RowPlan,
)
from trivet.capacity import PlanCapacity
from trivet.dtypes import as_torch

if TYPE_CHECKING:
    from torch import Tensor

TOKENS_FIRST = 0
"""Code of a cache laid out ``[pages, page_size, kv_heads, head_dim]``."""
NOT_CAUSAL, CAUSAL = 0, 1
NO_WINDOW = -1
NO_POSITIONS = 0
"""Code of queries and keys that carry their positions already."""
NO_SOFT_CAP = 0.0
UNSUPPORTED_GROUP = "Unsupported group_size"
"""What the decode kernel's planner says of a group size that it was not compiled for."""


def decode_spec(dtype: torch.dtype, head_dim: int) -> Any:
    """Build specification of the decode kernel."""
    return modules.gen_batch_decode_module(
        dtype, dtype, dtype, torch.int32, head_dim, head_dim, NO_POSITIONS, False, False
    )


def prefill_spec(dtype: torch.dtype, head_dim: int) -> Any:
    """Build specification of the general paged-prefill kernel (FA2), for keys and values of equal strides."""
    return modules._gen_batch_prefill_primary_module(
        "fa2", dtype, dtype, dtype, torch.int32, head_dim, head_dim, NO_POSITIONS, False, False, False
    )


def hopper_spec(dtype: torch.dtype, head_dim: int) -> Any:
    """Build specification of the Hopper paged-prefill kernel (FA3)."""
    return modules.gen_batch_prefill_module(
        "fa3", dtype, dtype, dtype, torch.int32, head_dim, head_dim, NO_POSITIONS, False, False, False
    )


def specs(dtype: torch.dtype, head_dim: int, choice: KernelChoice) -> list[Any]:
    """Build specifications of everything that a plan of `choice` runs."""
    wanted = [gen_page_module()]
    if not choice.pinned:
        wanted.append(prefill_spec(dtype, head_dim))
    if choice.decode is DecodeKernel.COMPILED:
        wanted.append(decode_spec(dtype, head_dim))
    if choice.hopper_from is not None:
        wanted.append(hopper_spec(dtype, head_dim))
    return wanted


def unbuilt(dtype: str, head_dim: int, choice: KernelChoice) -> list[tuple[str, Callable[[], Any]]]:
    """What of `specs` is not built yet: names, and what builds each."""
    wanted = specs(as_torch(dtype), head_dim, choice)
    return [(spec.name, spec.build_and_load) for spec in wanted if not spec.is_compiled]


def can_compile() -> bool:
    """Whether this machine has what builds a kernel that did not come built."""
    try:
        compiler = os.path.join(get_cuda_path(), "bin", "nvcc")
    except RuntimeError:
        return False
    return os.path.exists(compiler) and shutil.which("ninja") is not None


def decode_compiles(dtype: torch.dtype, head_dim: int, group: int) -> bool:
    """Ask the decode kernel's planner whether it is compiled for `group`; builds what did not come built."""
    module = decode_spec(dtype, head_dim).build_and_load()
    nothing = torch.empty(0, dtype=dtype)
    indptr = torch.tensor([0, 1], dtype=torch.int32)
    on_device = torch.empty(0, dtype=torch.uint8, device="cuda")
    try:
        module.workspace_size(
            on_device, indptr, 1, group, 1, 1, True, NO_WINDOW, NO_SOFT_CAP, head_dim, head_dim, nothing, nothing
        )
    except RuntimeError as error:
        if UNSUPPORTED_GROUP in str(error):
            return False
        raise
    return True


def load_kernels(capacity: PlanCapacity, choice: KernelChoice, device: torch.device | None = None) -> Kernels:
    """Load what `choice` names for `capacity`, building what did not come built (minutes).

    Args:
        device: where the kernels will run; None: the current CUDA device.

    Raises:
        RuntimeError: a kernel cannot be built; the library's message.
    """
    assert capacity.dtype is not None
    dtype, head_dim = as_torch(capacity.dtype), capacity.head_dim
    append: AppendKernel = Append(gen_page_module().build_and_load())
    if choice.pinned:
        return Kernels(_split_kv(capacity, device, True), _split_kv(capacity, device, True), None, append)
    general = prefill_spec(dtype, head_dim).build_and_load()
    decode: RowKernel
    if choice.decode is DecodeKernel.COMPILED:
        decode = CompiledDecode(capacity, decode_spec(dtype, head_dim).build_and_load(), dtype)
    elif choice.decode is DecodeKernel.SPLIT_KV:
        decode = _split_kv(capacity, device, False)
    else:
        decode = PagedPrefill(capacity, general, decode_rows=True)
    long_chunks: RowKernel | None = None
    if choice.hopper_from is not None:
        long_chunks = HopperPrefill(capacity, hopper_spec(dtype, head_dim).build_and_load())
    few = tuple((some.rows, _split_kv(capacity, device, False, some)) for some in choice.few_rows)
    chunks = PagedPrefill(capacity, general, decode_rows=False)
    return Kernels(decode, chunks, long_chunks, append, few)


def _split_kv(
    capacity: PlanCapacity, device: torch.device | None, by_token: bool, few: FewRows | None = None
) -> RowKernel:
    """The split-KV kernel, compiled."""
    from trivet.attention.flashinfer.split_kv import SplitKv

    if few is None:
        kernel = SplitKv(capacity, by_token=by_token)
    else:
        kernel = SplitKv(capacity, by_token=by_token, most_rows=few.rows, shape=few.shape)
    kernel.warm(device or torch.device("cuda"))
    return kernel


def launches_dependent(capacity: PlanCapacity) -> bool:
    """Whether decode rows are attended by programmatic dependent launch: their kernels start while others end."""
    return capacity.device is not None and capacity.device.launches_dependent


class CompiledDecode:
    """The CUDA-core decode kernel: rows of one token, a few group sizes."""

    def __init__(self, capacity: PlanCapacity, module: Any, dtype: torch.dtype) -> None:
        self._plan, self._workspace_size, self._run = module.plan, module.workspace_size, module.run
        nothing = torch.empty(0, dtype=dtype)
        head_dim = capacity.head_dim
        self._shape = (
            capacity.query_heads,
            capacity.kv_heads,
            capacity.limits.page_size,
            True,  # planned for CUDA graphs: offsets depend on the number of rows alone
            NO_WINDOW,
            NO_SOFT_CAP,
            head_dim,
            head_dim,
            nothing,
            nothing,
        )
        self._dependent = launches_dependent(capacity)
        self._scale = head_dim**-0.5

    def plan(self, rows: HostRows, spaces: PlanSpaces) -> RowPlan:
        """See `RowKernel.plan`."""
        return _planned(
            self._plan(spaces.floats, spaces.ints, spaces.staged, rows.page_indptr, rows.rows, *self._shape)
        )

    def asks(self, rows: HostRows, spaces: PlanSpaces) -> Workspace | None:
        """See `RowKernel.asks`."""
        return Workspace(*map(int, self._workspace_size(spaces.floats, rows.page_indptr, rows.rows, *self._shape)))

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
        """See `RowKernel.run`."""
        self._run(
            spaces.floats,
            spaces.ints,
            plan.info,
            query,
            keys,
            values,
            rows.page_indptr,
            rows.page_indices,
            rows.last_page_len,
            out,
            None,  # log-sum-exp
            TOKENS_FIRST,
            NO_WINDOW,
            self._dependent,
            None,  # ALiBi slopes
            NO_SOFT_CAP,
            self._scale,
            1.0,  # rotary scale and base, unused
            1.0,
        )


class PagedPrefill:
    """The general paged-prefill kernel (FA2): any group size.

    Args:
        decode_rows: every row is one token; the plan is then made for CUDA graphs, so that its offsets depend on the
            number of rows alone, and for tiles of that length, as the library's tensor-core decode does.
    """

    def __init__(self, capacity: PlanCapacity, module: Any, *, decode_rows: bool) -> None:
        self._plan, self._workspace_size, self._run = module.plan, module.workspace_size, module.paged_run
        self._heads = (capacity.query_heads, capacity.kv_heads, capacity.limits.page_size, decode_rows)
        self._rest = (
            capacity.head_dim,
            capacity.head_dim,
            not decode_rows,  # causal
            NO_WINDOW,
            -1,  # no fixed split
            False,  # KV may be split
            0,  # no other kernel beside it
            1 if decode_rows else 0,  # tokens of every row, if they are equal
            decode_rows,  # and stay so
        )
        self._mask = NOT_CAUSAL if decode_rows else CAUSAL
        self._dependent = decode_rows and launches_dependent(capacity)
        self._scale = capacity.head_dim**-0.5

    def plan(self, rows: HostRows, spaces: PlanSpaces) -> RowPlan:
        """See `RowKernel.plan`."""
        return _planned(self._plan(spaces.floats, spaces.ints, spaces.staged, *self._arguments(rows)))

    def asks(self, rows: HostRows, spaces: PlanSpaces) -> Workspace | None:
        """See `RowKernel.asks`."""
        return Workspace(*map(int, self._workspace_size(spaces.floats, *self._arguments(rows))))

    def _arguments(self, rows: HostRows) -> tuple[Any, ...]:
        heads = (rows.tokens, rows.rows, *self._heads)
        return (rows.query_indptr, rows.page_indptr, rows.kv_lengths, *heads, *self._rest)

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
        """See `RowKernel.run`."""
        self._run(
            *_prefill_arguments(plan, rows, spaces, query, keys, values, out, self._mask, self._dependent),
            None,  # custom mask and where its rows start
            None,
            None,  # ALiBi slopes
            None,  # prefix length, token positions and longest item of multi-item scoring
            None,
            None,
            None,  # scales of a quantised cache
            None,
            NO_SOFT_CAP,
            self._scale,
            1.0,  # rotary scale and base, unused
            1.0,
            0,  # length of the token positions
        )


class HopperPrefill:
    """The Hopper paged-prefill kernel (FA3): the fastest for long chunks, and slow for decode rows."""

    def __init__(self, capacity: PlanCapacity, module: Any) -> None:
        self._plan, self._run = module.plan, module.paged_run
        self._heads = (capacity.query_heads, capacity.kv_heads, capacity.limits.page_size)
        self._rest = (
            False,  # not for CUDA graphs
            capacity.head_dim,
            capacity.head_dim,
            True,  # causal
            NO_WINDOW,
        )
        self._scale = capacity.head_dim**-0.5

    def plan(self, rows: HostRows, spaces: PlanSpaces) -> RowPlan:
        """See `RowKernel.plan`."""
        return _planned(
            self._plan(
                spaces.floats,
                spaces.ints,
                spaces.staged,
                rows.query_indptr,
                rows.page_indptr,
                rows.kv_lengths,
                rows.tokens,
                rows.rows,
                *self._heads,
                *self._rest,
            )
        )

    def asks(self, rows: HostRows, spaces: PlanSpaces) -> Workspace | None:
        """None: this kernel's library has no such function. Planning raises where the int workspace is too small."""
        return None

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
        """See `RowKernel.run`."""
        self._run(
            *_prefill_arguments(plan, rows, spaces, query, keys, values, out, CAUSAL, False),
            None,  # prefix length, token positions and longest item of multi-item scoring
            None,
            None,
            None,  # scale of the values
            NO_SOFT_CAP,
            self._scale,
            1.0,  # scale of the values
            0,  # length of the token positions
        )


def _prefill_arguments(
    plan: RowPlan,
    rows: DeviceRows,
    spaces: PlanSpaces,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    mask: int,
    dependent: bool,
) -> tuple[Any, ...]:
    """What the run functions of both paged-prefill kernels begin with."""
    return (
        spaces.floats,
        spaces.ints,
        plan.info,
        query,
        keys,
        values,
        rows.query_indptr,
        rows.page_indptr,
        rows.page_indices,
        rows.last_page_len,
        out,
        None,  # log-sum-exp
        mask,
        TOKENS_FIRST,
        NO_WINDOW,
        dependent,
    )


class Append:
    """FlashInfer's paged append."""

    def __init__(self, module: Any) -> None:
        self._append = module.append_paged_kv_cache

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
        """See `AppendKernel`."""
        self._append(
            key,
            value,
            batch_indices,
            positions,
            keys,
            values,
            rows.page_indices,
            rows.page_indptr,
            rows.last_page_len,
            TOKENS_FIRST,
        )


def _planned(info: Any) -> RowPlan:
    return RowPlan(info, tuple(map(int, info)))
