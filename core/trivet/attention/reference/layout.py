"""The eleven arrays of the reference plan. The only place where their lengths stand."""

from trivet.capacity import PlanCapacity
from trivet.layout import BufferLayout, BufferSpec


def reference_layout(capacity: PlanCapacity) -> BufferLayout:
    """Buffers of one reference plan, all int32.

    - ``page_indices``: pages of all rows, row by row; row *r* has entries ``page_indptr[r]`` to ``page_indptr[r + 1]``.
    - ``last_page_len``: tokens in the last page of each row.
    - ``batch_indices``, ``positions``: row and position of each token of the step; where its key and value go.
    - ``q_indptr``: first token of each row in the step.
    - ``request_indices``, ``qo_tile_indices``, ``kv_tile_indices``: row, query tile and KV tile of each work item.
    - ``kv_chunk_size``: keys per KV tile; ``total_num_rows``: tokens in the step.
    """
    lengths = {
        "page_indices": capacity.pages,
        "page_indptr": capacity.indptr,
        "last_page_len": capacity.requests,
        "batch_indices": capacity.tokens,
        "positions": capacity.tokens,
        "q_indptr": capacity.indptr,
        "request_indices": capacity.tiles,
        "qo_tile_indices": capacity.tiles,
        "kv_tile_indices": capacity.tiles,
        "kv_chunk_size": 1,
        "total_num_rows": 1,
    }
    return BufferLayout("reference plan", tuple(BufferSpec(name, n, "int32") for name, n in lengths.items()))
