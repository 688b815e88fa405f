"""Every buffer of a FlashInfer plan. The only place where their lengths stand."""

from __future__ import annotations

from trivet import checked
from trivet.attention.flashinfer.bounds import (
    Workspace,
    compiled_decode_workspace,
    hopper_chunks_workspace,
    prefill_chunks_workspace,
    prefill_decode_workspace,
    split_kv_workspace,
)
from trivet.attention.flashinfer.kinds import DecodeKernel, KernelChoice
from trivet.capacity import PlanCapacity
from trivet.layout import BufferLayout, BufferSpec
from trivet.layout.staging import mirrors

DECODE_WORKSPACE = "decode_workspace"
CHUNK_WORKSPACE = "chunk_workspace"
FLOAT_WORKSPACE = "float_workspace"
DECODE_INDPTR = "decode_indptr"
SPLIT_COUNTERS = "split_counters"

INDEX_ARRAYS = ("page_indices", "page_indptr", "last_page_len", "chunk_indptr", "batch_indices", "positions")


def decode_workspace(capacity: PlanCapacity, choice: KernelChoice) -> Workspace:
    """The bound of what serves decode rows."""
    if choice.decode is DecodeKernel.COMPILED:
        return compiled_decode_workspace(capacity)
    if choice.decode is DecodeKernel.SPLIT_KV:
        return split_kv_workspace(capacity, by_token=choice.pinned)
    return prefill_decode_workspace(capacity)


def few_rows_workspace(capacity: PlanCapacity, choice: KernelChoice) -> Workspace:
    """The bound of the split-KV kernel where it serves steps of few rows alone; nothing where it does not."""
    spaces = [
        split_kv_workspace(capacity, by_token=False, most_rows=few.rows, shape=few.shape) for few in choice.few_rows
    ]
    return Workspace(
        float_bytes=max((space.float_bytes for space in spaces), default=0),
        int_bytes=max((space.int_bytes for space in spaces), default=0),
    )


def chunk_workspace(capacity: PlanCapacity, choice: KernelChoice) -> Workspace:
    """The bound of whatever may serve chunks."""
    if choice.pinned:
        return split_kv_workspace(capacity, by_token=True)
    general = prefill_chunks_workspace(capacity)
    if choice.hopper_from is None:
        return general
    hopper = hopper_chunks_workspace(capacity)
    return Workspace(
        float_bytes=max(general.float_bytes, hopper.float_bytes), int_bytes=max(general.int_bytes, hopper.int_bytes)
    )


def flashinfer_layout(capacity: PlanCapacity, choice: KernelChoice) -> BufferLayout:
    """Buffers of one FlashInfer plan.

    Index arrays, int32, on the device:

    - ``page_indices``: pages of all rows, row by row; row *r* has entries ``page_indptr[r]`` to ``page_indptr[r + 1]``.
    - ``last_page_len``: tokens in the last page of each row.
    - ``chunk_indptr``: first token of each chunk, counted from the first chunk's.
    - ``batch_indices``, ``positions``: row and position of each token; where its key and value go.
    - ``decode_indptr``: 0, 1, 2, ...: the first token of each decode row, where the paged-prefill kernel serves them.
      Written once.

    Workspaces, bytes, on the device: ``decode_workspace`` and ``chunk_workspace`` hold what the planners write for
    decode rows and for chunks, ``float_workspace`` the partial outputs of split rows; the two kinds of rows run one
    after the other and share it. Arrays inside a workspace keep their offsets for as long as the number of decode
    rows stays the same. What the split-KV kernel serves is not planned: of its int workspace it uses counters alone.

    ``split_counters``: those of the split-KV kernel where it serves steps of few rows beside another kernel, whose plan
    the int workspace holds.

    All index arrays but ``decode_indptr``, and the two int workspaces, have a pinned mirror in each of two sets.
    Sizes do not depend on CUDA-graph buckets: a bucket's arrays are the first entries of the same buffers.

    Raises:
        CapacityExceeded: the page lists address more tokens, or a step has more query elements, than the kernels'
            32-bit arithmetic takes.
        ConfigError: the capacity names no device.
    """
    checked.int32("tokens of all page lists", capacity.pages * capacity.limits.page_size)
    checked.int32("query elements of a step", capacity.tokens * capacity.attention.query_elements)
    decode, chunks = decode_workspace(capacity, choice), chunk_workspace(capacity, choice)
    lengths = {
        "page_indices": capacity.pages,
        "page_indptr": capacity.indptr,
        "last_page_len": capacity.requests,
        "chunk_indptr": capacity.indptr,
        "batch_indices": capacity.tokens,
        "positions": capacity.tokens,
    }
    mirrored = [
        *(BufferSpec(name, lengths[name], "int32") for name in INDEX_ARRAYS),
        BufferSpec(DECODE_WORKSPACE, decode.int_bytes, "uint8"),
        BufferSpec(CHUNK_WORKSPACE, chunks.int_bytes, "uint8"),
    ]
    few = few_rows_workspace(capacity, choice)
    float_bytes = max(decode.float_bytes, chunks.float_bytes, few.float_bytes, 1)
    specs = [*mirrored, BufferSpec(FLOAT_WORKSPACE, float_bytes, "uint8")]
    if few.int_bytes:
        specs.append(BufferSpec(SPLIT_COUNTERS, few.int_bytes, "uint8"))
    if choice.decode is DecodeKernel.PAGED_PREFILL:
        specs.append(BufferSpec(DECODE_INDPTR, capacity.indptr, "int32"))
    return BufferLayout("FlashInfer plan", (*specs, *mirrors(mirrored)))
