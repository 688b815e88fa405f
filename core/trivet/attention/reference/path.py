"""The decode path of the reference backend: serves every geometry, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from trivet.attention.protocol import PathRequest, PlanOwner, Verdict
from trivet.attention.reference.layout import reference_layout
from trivet.capacity import PlanCapacity, TileShape
from trivet.geometry import AttentionGeometry
from trivet.layout import BufferLayout, Buffers

if TYPE_CHECKING:
    from trivet.attention.reference.owner import ReferenceOwner


REFERENCE = "reference"
"""Name of the path and of its backend."""

STANDARD_TILE = TileShape(query_tokens=64, kv_tokens=2048)
"""Bounds the scores of one work item to a few megabytes."""


@frozen
class ReferencePath:
    """Paged attention in torch.

    Attributes:
        tile_shape: tiles that the kernel cuts work into; tests shrink them.
    """

    tile_shape: TileShape = STANDARD_TILE

    @property
    def name(self) -> str:
        """``"reference"``."""
        return REFERENCE

    @property
    def backend(self) -> str:
        """``"reference"``."""
        return REFERENCE

    def usable(self, need: PathRequest) -> Verdict:
        """Yes for every group size, head dim, page size and served dtype, under the ``tuned`` policy."""
        if need.numeric_policy == "pinned":
            return Verdict(
                False,
                "torch's matrix products choose their reduction order by the number of rows, so that the reference "
                "backend cannot promise results that do not depend on the batch; use numeric_policy='tuned'",
            )
        return Verdict(True, f"plain torch serves group size {need.attention.group_size} on any device")

    def tile(self, attention: AttentionGeometry) -> TileShape:
        """The same tiles for every geometry."""
        return self.tile_shape

    def layout(self, capacity: PlanCapacity) -> BufferLayout:
        """The eleven arrays."""
        return reference_layout(capacity)

    def scratch_bytes(self, capacity: PlanCapacity, dtype: str) -> int:
        """Bound on the temporaries of one attention call."""
        from trivet.attention.reference.scratch import scratch_bytes

        return scratch_bytes(capacity, dtype)

    def bind(self, capacity: PlanCapacity, buffers: Buffers) -> PlanOwner:
        """The owner over `buffers`."""
        from trivet.attention.reference.owner import ReferenceOwner

        owner: ReferenceOwner = ReferenceOwner(capacity, buffers)
        return owner
