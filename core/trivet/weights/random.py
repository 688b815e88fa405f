"""Random weights: seeded, drawn on the device, the same whatever is drawn beside them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from trivet.weights.loader import ParameterBuffers, Progress, parameter_views
from trivet.weights.map import Initial, WeightMap

if TYPE_CHECKING:
    import torch

BLOCK_ELEMENTS = 4 * 2**20
"""Drawn at once. Part of what a seed means: another length gives other values on the CPU."""


def fill_random(
    weight_map: WeightMap, buffers: ParameterBuffers, seed: int, progress: Progress | None = None
) -> dict[str, torch.Tensor]:
    """Fill every parameter with its initial draw, in place, and return the parameters as views.

    Each parameter has a generator of its own, seeded by `seed` and its name, so that neither order nor
    neighbours change a value. Draws are made in float32 and rounded, through a scratch of at most
    ``BLOCK_ELEMENTS`` where the parameter is narrower, so that one seed gives one model in any dtype. CPU and
    CUDA draw different numbers.

    Progress is told after each parameter, once the device has drawn it.
    """
    import torch

    total_bytes = sum(buffers[parameter.name].nbytes for parameter in weight_map.parameters)
    done_bytes = 0
    for parameter in weight_map.parameters:
        flat = buffers[parameter.name]
        generator = torch.Generator(device=flat.device)
        generator.manual_seed(_parameter_seed(seed, parameter.name))
        for first in range(0, parameter.elements, BLOCK_ELEMENTS):
            block = flat[first : first + BLOCK_ELEMENTS]
            if block.dtype == torch.float32:
                _draw(block, parameter.initial, generator)
            else:
                scratch = torch.empty(block.shape, dtype=torch.float32, device=block.device)
                _draw(scratch, parameter.initial, generator)
                block.copy_(scratch)
        done_bytes += flat.nbytes
        if progress is not None:
            if flat.is_cuda:  # draws are only queued, and the host is far ahead
                torch.cuda.current_stream(flat.device).synchronize()
            progress(done_bytes, total_bytes)
    return parameter_views(weight_map, buffers)


def _draw(block: torch.Tensor, initial: Initial, generator: torch.Generator) -> None:
    """Fill `block`, flat float32, with draws of `initial`."""
    if initial.kind == "normal":
        block.normal_(initial.centre, initial.spread, generator=generator)
        return
    # The bounds are formed in float64: a small lower bound would be lost from a float32 centre - spread.
    low, high = initial.centre - initial.spread, initial.centre + initial.spread
    block.uniform_(low, high, generator=generator)
    if initial.kind == "log_uniform":
        block.log_()


def _parameter_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # what a generator takes is signed
