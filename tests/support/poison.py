"""NaN in every place of a runtime's caches that nobody is to read."""

from __future__ import annotations

import torch

import trivet
from trivet.caches.kv import PADDING_PAGES
from trivet.caches.state import PADDING_SLOTS

NAN = float("nan")


@torch.inference_mode()
def poison(runtime: trivet.Runtime) -> int:
    """Fill free and padding pages, page tails, free and padding slots and free snapshots with NaN, between two steps.

    A page tail is what follows a running request's last computed token on its pages. Pages, slots and snapshots that
    are lent, and pages that the prefix cache keeps, are left alone.

    Returns:
        How many pages, slots and snapshots were filled as a whole.
    """
    engine = runtime._engine
    scheduler, blueprint = engine.scheduler, engine.blueprint
    holdings, page_size = scheduler._holdings, blueprint.capacity.limits.page_size
    total = holdings.pool.total
    pages = [page for page in range(total) if holdings.pool.is_free(page)] + list(range(total, total + PADDING_PAGES))
    for layer in blueprint.geometry.attention_layers:
        for cache in engine.cache.layer(layer):
            cache[pages] = NAN
            for request in scheduler.running:
                for index in range(request.computed_tokens // page_size, len(request.pages)):
                    cache[request.pages[index], max(0, request.computed_tokens - index * page_size) :] = NAN
    slots = [slot for slot in range(holdings.slots.total) if holdings.slots.is_free(slot)]
    slots += range(holdings.slots.total, holdings.slots.total + PADDING_SLOTS)
    snapshots: list[int] = []
    if holdings.shelf is not None:
        ids = holdings.shelf._ids
        snapshots = [snapshot for snapshot in range(ids.total) if ids.is_free(snapshot)]
    if engine.state is not None:
        for view in engine.state._slot_views.values():
            view[slots] = NAN
        for view in engine.state._snapshot_views.values():
            view[snapshots] = NAN
    return len(pages) + len(slots) + len(snapshots)
