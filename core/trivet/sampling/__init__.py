"""Sampling: what a request asks for, and the batched draw of the next token of every row.

What is exported here is free of torch. `trivet.sampling.batch`, `trivet.sampling.sampler` and
`trivet.sampling.logprobs` are not.
"""

from trivet.sampling.layout import penalty_layout, sampler_layout, sampler_scratch_bytes
from trivet.sampling.params import Sampling
from trivet.sampling.seeds import derive_seed

__all__ = ["Sampling", "derive_seed", "penalty_layout", "sampler_layout", "sampler_scratch_bytes"]
