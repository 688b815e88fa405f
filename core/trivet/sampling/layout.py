"""The sampler's buffers, and the bound on its scratch. Free of torch."""

from __future__ import annotations

from trivet.layout import BufferLayout, BufferSpec
from trivet.sampling.params import LOGPROBS_MAX

CHUNK_ELEMENTS = 2**22
CHUNK_ELEMENTS_CPU = 2**18
"""Logits that are filtered or drawn from at once; more rows take turns, so that scratch stays bounded. On the
CPU a chunk stays within the caches."""

SCRATCH_BYTES_PER_ELEMENT = 96
"""What filtering one logit holds at once, at most: 64-bit keys, their sort with its indices and scratch of its own,
the masses and their running sum, and float32 temporaries. 54 were measured on the CPU."""

ALTERNATIVE_BYTES = 12
"""One reported alternative: its id in int64 and its log-probability in float32."""
PACKED_ALTERNATIVE_BYTES = 44
"""The same while it is packed for the transfer to the host: beside itself, in int64 with its row and with all rows."""

VALUES_PER_SAMPLE = 2
"""Of a sample that is packed for the transfer to the host: its new token, and whether its row was unusable."""


def sampler_layout(slots: int, vocabulary: int) -> BufferLayout:
    """Parameters of `slots` requests and one padding slot (the last), and the hash of every token.

    Every buffer but ``token_hashes`` ([vocabulary]) has one element for each slot.
    """
    each = slots + 1
    return BufferLayout(
        "sampler",
        (
            BufferSpec("temperature", each, "float32"),
            BufferSpec("top_k", each, "int64"),
            BufferSpec("top_p", each, "float64"),
            BufferSpec("min_p", each, "float32"),
            BufferSpec("repetition_penalty", each, "float32"),
            BufferSpec("presence_penalty", each, "float32"),
            BufferSpec("frequency_penalty", each, "float32"),
            BufferSpec("seed", each, "int64"),
            BufferSpec("token_hashes", vocabulary, "int32"),
        ),
    )


def penalty_layout(slots: int, vocabulary: int) -> BufferLayout:
    """What penalties count: [slots + 1, vocabulary] in both buffers, the last slot being padding.

    ``in_prompt`` marks the prompt's tokens; ``output_counts`` counts each token of the output.
    """
    return BufferLayout(
        "penalties",
        (
            BufferSpec("in_prompt", (slots + 1) * vocabulary, "bool"),
            BufferSpec("output_counts", (slots + 1) * vocabulary, "int32"),
        ),
    )


def chunk_rows(vocabulary: int, device_type: str) -> int:
    """How many rows are filtered or drawn from at once on a ``"cpu"`` or ``"cuda"`` device."""
    return max(1, (CHUNK_ELEMENTS_CPU if device_type == "cpu" else CHUNK_ELEMENTS) // vocabulary)


def sampler_scratch_bytes(rows: int, vocabulary: int, device_type: str) -> int:
    """Most bytes that sampling or scoring `rows` rows holds beside the logits: scratch, and reported alternatives."""
    filtered = min(rows, chunk_rows(vocabulary, device_type)) * vocabulary * SCRATCH_BYTES_PER_ELEMENT
    alternatives = rows * min(vocabulary, LOGPROBS_MAX)
    return max(filtered + alternatives * ALTERNATIVE_BYTES, alternatives * PACKED_ALTERNATIVE_BYTES)
