"""Length of a rotary table. Free of torch: the planner asks without it."""

from trivet.config.rope import Rope
from trivet.layout import BufferLayout, BufferSpec


def rotary_layout(rope: Rope, positions: int) -> BufferLayout:
    """Cosines and sines of `positions` positions in float32, as `trivet.ops.rotary` lays them out."""
    return BufferLayout("rotary table", (BufferSpec("table", positions * rope.rotary_dim, "float32"),))
