"""Which kernels a path runs on: one for decode rows, one or two for chunks."""

from __future__ import annotations

from enum import Enum

from attrs import frozen

from trivet.attention.flashinfer.splits import SplitShape

SERVED_HEAD_DIMS = (64, 128, 256)
"""Head dims that are tested. Others fault (96) or are silently wrong (72) in the paged-prefill kernel."""

SERVED_DTYPES = ("bfloat16", "float16")


class DecodeKernel(Enum):
    """What decode rows run on."""

    COMPILED = "decode kernel"
    """CUDA cores, compiled for a few group sizes."""
    PAGED_PREFILL = "paged-prefill kernel"
    """Tensor cores, any group size: a decode row is a prefill row of one token."""
    SPLIT_KV = "split-KV kernel"
    """Ours, in Triton: tensor cores, any group size, no planning on the host."""


@frozen
class LongChunks:
    """From where on chunks are long: both must be reached.

    Attributes:
        average_tokens: average length of a step's chunks.
        total_tokens: tokens of all chunks of a step.
    """

    average_tokens: int
    total_tokens: int

    def reached(self, tokens: int, rows: int) -> bool:
        """Whether `rows` chunks of `tokens` tokens together are long."""
        return tokens >= self.total_tokens and tokens >= self.average_tokens * rows


@frozen
class FewRows:
    """Steps of few decode rows, on the split-KV kernel.

    Attributes:
        rows: up to how many.
        shape: how it cuts them.
    """

    rows: int
    shape: SplitShape


@frozen
class KernelChoice:
    """The kernels of one plan.

    Attributes:
        decode: what decode rows run on.
        hopper_from: chunks run on the Hopper prefill kernel (FA3) where they are this long, and on the general one
            (FA2) otherwise; None: always on the general one.
        few_rows: steps of few decode rows run on the split-KV kernel instead of `decode`, the first entry that holds
            them; ascending.
        pinned: every token, those of chunks too, is served by the split-KV kernel as a row of its own, and no result
            depends on chunking or on the batch.
    """

    decode: DecodeKernel
    hopper_from: LongChunks | None = None
    few_rows: tuple[FewRows, ...] = ()
    pinned: bool = False
