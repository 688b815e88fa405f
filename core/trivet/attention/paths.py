"""The standard decode paths, in order of preference. An ordinary family registers them in one line."""

from trivet.attention.flashinfer.kinds import DecodeKernel
from trivet.attention.flashinfer.paths import FlashInferPath
from trivet.attention.protocol import DecodePath
from trivet.attention.reference.path import ReferencePath


def standard_paths() -> tuple[DecodePath, ...]:
    """The paths that the SDK brings, best first. The first whose predicate says yes serves."""
    return (
        FlashInferPath(DecodeKernel.SPLIT_KV),
        FlashInferPath(DecodeKernel.COMPILED),
        FlashInferPath(DecodeKernel.PAGED_PREFILL),
        FlashInferPath(DecodeKernel.SPLIT_KV, pinned=True),
        ReferencePath(),
    )
