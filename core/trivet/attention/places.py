"""Where the tokens of a step go in the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class TokenPlaces(NamedTuple):
    """What an owner may offer as ``token_places(rows)`` beside `PlanOwner`; a kernel then writes the cache itself.

    See `trivet.attention.protocol.DecodePath`.

    int32 views of the plan's buffers, which stay in place when a later step is planned. Token *i* goes to position
    ``positions[i]`` of row ``batch_indices[i]``, whose pages begin at that row's entry of ``page_indptr`` in
    ``page_indices``.
    """

    batch_indices: Tensor
    positions: Tensor
    page_indptr: Tensor
    page_indices: Tensor
