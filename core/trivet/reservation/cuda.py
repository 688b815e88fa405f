"""What a CUDA runtime takes besides its own buffers and temporaries: the driver's context, and captured graphs."""

from __future__ import annotations

from attrs import evolve

from trivet import checked
from trivet.capacity import RuntimeCapacity
from trivet.dtypes import item_bytes
from trivet.reservation.activations import ROUNDING_SHARE, forward_bytes
from trivet.reservation.ledger import LedgerLine

MIB = 2**20

CONTEXT_LINE = "CUDA context"
GRAPHS_LINE = "CUDA graphs"
GRAPHS_DRIVER_LINE = "CUDA graphs, driver"

CONTEXT_BYTES = 768 * MIB
"""Bound on the driver's context with the kernels of torch, cuBLAS, FlashInfer and Triton loaded (751 MiB were measured
on an H200). Nothing of it is in torch's statistics."""

GRAPH_POOL_SLACK_BYTES = 96 * MIB
"""Bound on what a graph pool takes beside the tensors in it: cuBLAS's workspace of the capturing stream (32 MiB on
compute capability 9.0), and segments that torch's allocator rounds up to (2 and 20 MiB), a few of them at once."""

GRAPH_DRIVER_BYTES, GRAPH_LAYER_BYTES = 80 * MIB, MIB // 16
"""Bound on what the driver takes for the first capture, and for one layer of one captured step, outside torch's view
(76 MiB with 5 steps of 8 layers, and 80 MiB with 9 of 40, were measured on an H200)."""


def graph_pool_bytes(capacity: RuntimeCapacity, sampler_scratch_bytes: int) -> int:
    """Bound on the memory pool of all graphs, in bytes: what every step leaves, and temporaries of the largest step.

    A decode step leaves logits, a prompt's the hidden states of its tokens. Temporaries are of the layers of a decode
    step, of those of a prompt, and of sampling: what one of them frees need not be large enough for another.
    """
    if not capacity.graph_buckets:
        return 0
    largest = capacity.graph_buckets[-1]
    logits = sum(capacity.graph_buckets) * capacity.geometry.vocab_size * item_bytes(capacity.dtype)
    hidden = sum(capacity.prompt_buckets) * capacity.geometry.hidden_size * item_bytes(capacity.dtype)
    attended = sum(largest * plan.attention.query_elements * item_bytes(capacity.dtype) for plan in capacity.plans)
    decode = evolve(capacity, step_tokens=largest, step_rows=largest, logit_rows=largest)
    temporaries = forward_bytes(decode, attended, decode=True) + sampler_scratch_bytes
    if capacity.prompt_buckets:
        prompt = evolve(capacity, step_tokens=capacity.prompt_buckets[-1], step_rows=1, logit_rows=1)
        temporaries += forward_bytes(prompt, attended)
    rounding = temporaries // ROUNDING_SHARE
    return checked.sum_bytes("CUDA graph pool", (temporaries, rounding, logits, hidden, GRAPH_POOL_SLACK_BYTES))


def graph_driver_bytes(capacity: RuntimeCapacity) -> int:
    """Bound on what the driver takes for all graphs, in bytes."""
    layers = len(capacity.geometry.layers)
    steps = len(capacity.graph_buckets) + len(capacity.prompt_buckets)
    return checked.int64("CUDA graphs", GRAPH_DRIVER_BYTES + steps * layers * GRAPH_LAYER_BYTES)


def cuda_lines(capacity: RuntimeCapacity, sampler_scratch_bytes: int) -> tuple[LedgerLine, ...]:
    """The lines of a CUDA device; none for another."""
    if capacity.device.kind != "cuda":
        return ()
    lines = [LedgerLine(CONTEXT_LINE, CONTEXT_BYTES, "bound on the driver's context and libraries", owned=False)]
    if capacity.graph_buckets:
        buckets = ", ".join(map(str, capacity.graph_buckets))
        prompts = "".join(f", prompts of {tokens} tokens" for tokens in capacity.prompt_buckets)
        for name, size, whose in (
            (
                GRAPHS_LINE,
                graph_pool_bytes(capacity, sampler_scratch_bytes),
                f"decode steps of {buckets} rows{prompts}",
            ),
            (GRAPHS_DRIVER_LINE, graph_driver_bytes(capacity), "the driver's part of them"),
        ):
            lines.append(LedgerLine(name, size, f"bound for {whose}", owned=False, lower="cuda_graphs=False"))
    return tuple(lines)
