"""The prefix cache finds pages by all that came before them, evicts leaf first, and counts as it goes."""

from __future__ import annotations

import random
import sys
from array import array
from types import FrameType
from typing import Any

import pytest

from trivet.caches.digests import extend_digests
from trivet.caches.node import PrefixNode
from trivet.caches.pages import PagePool
from trivet.caches.prefix import PrefixCache
from trivet.caches.slots import SlotPool
from trivet.errors import AccountingError

PAGE_SIZE = 4


def digests_of(tokens: list[int], page_size: int = PAGE_SIZE) -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, array("i", tokens), page_size, len(tokens) // page_size)
    return digests


def publish(cache: PrefixCache, pool: PagePool, tokens: list[int]) -> PrefixNode:
    """Publish all full pages of `tokens` as a request would, and end it."""
    digests = digests_of(tokens, cache.page_size)
    node = cache.match(digests).node
    cache.pin(node)
    for digest in digests[node.depth :]:
        page = pool.take(1)[0]
        node = cache.publish(node, digest, page)
        if node.page != page:
            pool.give_back([page])
    cache.unpin(node)
    return node


def hit_pages(cache: PrefixCache, tokens: list[int]) -> int:
    return len(cache.match(digests_of(tokens, cache.page_size)).pages)


def tokens_of(rng: random.Random, pages: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(pages * PAGE_SIZE)]


def test_a_page_is_found_only_behind_the_tokens_that_it_was_computed_behind() -> None:
    pool = PagePool(20)
    cache = PrefixCache(pool, PAGE_SIZE)
    first, second, page = [1] * 4, [2] * 4, [9] * 4
    publish(cache, pool, first + page)
    assert hit_pages(cache, first + page) == 2
    assert hit_pages(cache, second + page) == 0
    assert hit_pages(cache, page) == 0
    assert hit_pages(cache, first + second + page) == 1


@pytest.mark.parametrize("changed", range(12))
def test_every_token_of_a_page_and_of_its_parents_counts(changed: int) -> None:
    pool = PagePool(20)
    cache = PrefixCache(pool, PAGE_SIZE)
    tokens = [*range(12)]
    publish(cache, pool, tokens)
    tokens[changed] += 1
    assert hit_pages(cache, tokens) == changed // PAGE_SIZE


def test_digests_are_the_same_however_often_they_are_extended() -> None:
    tokens = array("i", range(40))
    at_once: list[bytes] = []
    extend_digests(at_once, tokens, 3, 13)
    in_steps: list[bytes] = []
    for pages in (0, 1, 1, 5, 13):
        extend_digests(in_steps, tokens, 3, pages)
    assert in_steps == at_once and len(set(at_once)) == 13


def test_a_match_looks_no_further_than_its_limit() -> None:
    pool = PagePool(20)
    cache = PrefixCache(pool, PAGE_SIZE)
    tokens = [*range(16)]
    publish(cache, pool, tokens)
    match = cache.match(digests_of(tokens), 3)
    assert (len(match.pages), match.hit_tokens, match.page_tokens) == (3, 12, 12)


def test_the_least_recently_used_leaf_goes_first_and_parents_after_their_children() -> None:
    rng = random.Random()
    pool = PagePool(100)
    cache = PrefixCache(pool, PAGE_SIZE)
    stem, other = tokens_of(rng, 2), tokens_of(rng, 3)
    old, new = stem + tokens_of(rng, 1), stem + tokens_of(rng, 2)
    publish(cache, pool, old)
    publish(cache, pool, other)
    publish(cache, pool, new)
    lengths = [(3, 3, 4), (2, 3, 4), (2, 2, 4), (2, 1, 4), (2, 0, 4), (2, 0, 3), (2, 0, 2), (1, 0, 1), (0, 0, 0)]
    for expected in lengths:
        assert tuple(hit_pages(cache, tokens) for tokens in (old, other, new)) == expected
        if cache.cached_count:
            cache.evict(1)
    assert pool.free_count == 100


def test_use_makes_recent() -> None:
    rng = random.Random()
    pool = PagePool(100)
    cache = PrefixCache(pool, PAGE_SIZE)
    first, second = tokens_of(rng, 2), tokens_of(rng, 2)
    publish(cache, pool, first)
    publish(cache, pool, second)
    publish(cache, pool, first)
    cache.evict(2)
    assert (hit_pages(cache, first), hit_pages(cache, second)) == (2, 0)


def test_what_is_pinned_is_not_evicted_nor_counted_as_evictable() -> None:
    rng = random.Random()
    pool = PagePool(100)
    cache = PrefixCache(pool, PAGE_SIZE)
    stem = tokens_of(rng, 3)
    publish(cache, pool, stem + tokens_of(rng, 2))
    publish(cache, pool, stem + tokens_of(rng, 4))
    node = cache.match(digests_of(stem)).node
    cache.pin(node)
    assert cache.cached_count == 6
    cache.evict(6)
    assert hit_pages(cache, stem) == 3
    with pytest.raises(AccountingError):
        cache.evict(1)
    cache.unpin(node)
    with pytest.raises(AccountingError):
        cache.unpin(node)


def test_an_unpinned_copy_is_replaced_by_the_publishers_page_and_freed() -> None:
    pool = PagePool(10)
    cache = PrefixCache(pool, PAGE_SIZE)
    (digest,) = digests_of([1, 2, 3, 4])
    cache.pin(cache.root)
    (old,) = pool.take(1)
    cache.unpin(cache.publish(cache.root, digest, old))
    free_and_cached = pool.free_count + cache.cached_count
    cache.pin(cache.root)
    (new,) = pool.take(1)
    node = cache.publish(cache.root, digest, new)
    assert node.page == new and pool.is_free(old)
    assert pool.free_count + cache.cached_count == free_and_cached - 1  # for the page that was taken, and no more


def test_a_pinned_copy_stays_the_shared_one() -> None:
    pool = PagePool(10)
    cache = PrefixCache(pool, PAGE_SIZE)
    (digest,) = digests_of([1, 2, 3, 4])
    old, new = pool.take(2)
    cache.pin(cache.root)
    first = cache.publish(cache.root, digest, old)
    cache.pin(cache.root)
    second = cache.publish(cache.root, digest, new)
    assert second is first and second.page == old
    assert not pool.is_free(new)
    cache.unpin(first)
    assert cache.cached_count == 0
    cache.unpin(second)
    assert cache.cached_count == 1


def test_what_lies_below_a_withdrawn_page_is_not_found_when_the_page_is_computed_again() -> None:
    rng = random.Random()
    pool = PagePool(20)
    cache = PrefixCache(pool, PAGE_SIZE)
    tokens = tokens_of(rng, 4)
    publish(cache, pool, tokens)
    cache.retract(cache.match(digests_of(tokens[:8])).node)
    publish(cache, pool, tokens[:8])
    assert hit_pages(cache, tokens) == 2
    publish(cache, pool, tokens)
    assert hit_pages(cache, tokens) == 4
    cache.evict(cache.cached_count)
    assert pool.free_count == 20


def test_a_request_whose_chain_was_forgotten_leaves_newer_copies_alone() -> None:
    rng = random.Random()
    pool = PagePool(20)
    cache = PrefixCache(pool, PAGE_SIZE)
    tokens = tokens_of(rng, 2)
    first, second = digests_of(tokens)
    cache.pin(cache.root)
    node = cache.publish(cache.root, first, pool.take(1)[0])
    cache.clear()
    publish(cache, pool, tokens)
    node = cache.publish(node, second, pool.take(1)[0])
    assert hit_pages(cache, tokens) == 2
    cache.unpin(node)
    assert (cache.cached_count, pool.free_count) == (2, 18)


def test_a_hit_of_a_hybrid_model_ends_at_the_deepest_snapshot() -> None:
    rng = random.Random()
    pool = PagePool(20)
    cache = PrefixCache(pool, PAGE_SIZE, 8, SlotPool(2, "snapshot"))
    assert cache.snapshots is not None
    tokens = tokens_of(rng, 6)
    publish(cache, pool, tokens)
    assert cache.match(digests_of(tokens)).hit_tokens == 0
    node = cache.find(digests_of(tokens[:16])[-1])
    assert node is not None
    snapshot = cache.snapshots.take(owner=1)
    assert snapshot is not None
    cache.snapshots.attach(node, snapshot, None)
    match = cache.match(digests_of(tokens))
    assert (match.hit_tokens, match.page_tokens, len(match.pages), match.node) == (16, 24, 4, node)


def test_the_least_recently_used_snapshot_makes_room_unless_it_is_about_to_be_restored() -> None:
    rng = random.Random()
    pool = PagePool(20)
    ids = SlotPool(2, "snapshot")
    cache = PrefixCache(pool, PAGE_SIZE, PAGE_SIZE, ids)
    shelf = cache.snapshots
    assert shelf is not None
    nodes = [publish(cache, pool, tokens_of(rng, 1)) for _ in range(3)]
    for node in nodes[:2]:
        snapshot = shelf.take(owner=1)
        assert snapshot is not None
        shelf.attach(node, snapshot, None)
    cache.pin(nodes[0])
    shelf.hold(nodes[0])
    assert shelf.take(owner=1) is not None
    assert nodes[0].snapshot is not None and nodes[1].snapshot is None
    assert shelf.take(owner=1) is None
    shelf.unhold(nodes[0])
    assert shelf.take(owner=1, trailing=True) is None
    assert shelf.take(owner=1) is not None
    assert nodes[0].snapshot is None


def test_a_snapshot_that_was_used_is_not_the_first_to_make_room() -> None:
    rng = random.Random()
    pool = PagePool(20)
    ids = SlotPool(2, "snapshot")
    cache = PrefixCache(pool, PAGE_SIZE, PAGE_SIZE, ids)
    shelf = cache.snapshots
    assert shelf is not None
    older, newer = (publish(cache, pool, tokens_of(rng, 1)) for _ in range(2))
    shelf.attach(older, ids.take(), None)
    shelf.attach(newer, ids.take(), None)
    shelf.hold(older)
    shelf.unhold(older)
    assert shelf.take(owner=1) is not None
    assert older.snapshot is not None and newer.snapshot is None


@pytest.mark.parametrize("held", [False, True])
def test_a_forgotten_page_keeps_no_snapshot(held: bool) -> None:
    rng = random.Random()
    pool = PagePool(20)
    ids = SlotPool(2, "snapshot")
    cache = PrefixCache(pool, PAGE_SIZE, PAGE_SIZE, ids)
    shelf = cache.snapshots
    assert shelf is not None
    tokens = tokens_of(rng, 1)
    node = publish(cache, pool, tokens)
    shelf.attach(node, ids.take(), None)
    cache.pin(node)
    if held:
        shelf.hold(node)
    cache.clear()
    assert ids.free_count == (1 if held else 2)
    if held:
        shelf.unhold(node)
    assert not shelf.attach(node, ids.take(), None)
    assert ids.free_count == 2


def test_evicting_a_page_frees_its_snapshot() -> None:
    rng = random.Random()
    pool = PagePool(20)
    ids = SlotPool(1, "snapshot")
    cache = PrefixCache(pool, PAGE_SIZE, PAGE_SIZE, ids)
    assert cache.snapshots is not None
    node = publish(cache, pool, tokens_of(rng, 1))
    cache.snapshots.attach(node, ids.take(), None)
    cache.evict(1)
    assert ids.free_count == 1


def filled(pages: int) -> tuple[PagePool, PrefixCache]:
    rng = random.Random(pages)
    pool = PagePool(pages + 64)
    cache = PrefixCache(pool, PAGE_SIZE)
    while len(cache) < pages:
        publish(cache, pool, tokens_of(rng, min(10, pages - len(cache))))
    return pool, cache


def lines_run(call: Any) -> int:
    """How many lines of the cache `call` runs, built-in functions counting as one."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def test_lookup_and_eviction_do_no_more_work_in_a_larger_cache() -> None:
    rng = random.Random()
    tokens = tokens_of(rng, 10)
    work = []
    for pages in (100, 10_000):
        pool, cache = filled(pages)
        digests = digests_of(tokens)
        missed = lines_run(lambda cache=cache, digests=digests: cache.match(digests))
        published = lines_run(lambda cache=cache, pool=pool: publish(cache, pool, tokens))
        hit = lines_run(lambda cache=cache, digests=digests: cache.match(digests))
        evicted = lines_run(lambda cache=cache: cache.evict(5))
        work.append((missed, published, hit, evicted))
    assert work[0] == work[1]


def test_lapsed_heap_entries_are_swept() -> None:
    pool, cache = filled(100)
    tokens = tokens_of(random.Random(), 3)
    for _ in range(2000):
        publish(cache, pool, tokens)
    assert len(cache._leaves) < 400
    cache.evict(cache.cached_count)
    assert pool.free_count == pool.total
