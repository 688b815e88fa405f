"""Pools lend each id once, and refuse what they did not lend."""

from __future__ import annotations

import random

import pytest

from trivet.caches.pages import PagePool
from trivet.caches.slots import SlotPool
from trivet.errors import AccountingError, TrivetError


def test_every_page_is_lent_exactly_once() -> None:
    rng = random.Random()
    pool = PagePool(50)
    lent: list[int] = []
    for _ in range(500):
        if rng.random() < 0.5 and pool.free_count:
            taken = pool.take(rng.randint(0, pool.free_count))
            assert not set(taken) & set(lent)
            lent += taken
        elif lent:
            rng.shuffle(lent)
            count = rng.randint(1, len(lent))
            pool.give_back(lent[:count])
            del lent[:count]
        assert len(set(lent)) == len(lent) == pool.total - pool.free_count
        assert set(lent) <= set(range(50))
        assert all(pool.is_free(page) != (page in lent) for page in range(50))


@pytest.mark.parametrize("returned", [[0], [3, 3], [3, 0], [-1], [50], [3, 50]])
def test_a_page_that_is_not_lent_is_not_taken_back(returned: list[int]) -> None:
    pool = PagePool(50)
    pool.take(4)
    pool.give_back([0])
    before = pool.free_count
    with pytest.raises(AccountingError, match="page"):
        pool.give_back(returned)
    assert pool.free_count == before
    pool.give_back([1, 2, 3])


def test_more_than_is_free_is_not_lent() -> None:
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(AccountingError, match="2 asked for, 1 of 3"):
        pool.take(2)
    assert pool.free_count == 1


def test_a_slot_is_lent_once_and_returned_once() -> None:
    pool = SlotPool(2)
    first, second = pool.take(), pool.take()
    assert {first, second} == {0, 1}
    with pytest.raises(AccountingError):
        pool.take()
    pool.give_back(first)
    with pytest.raises(AccountingError):
        pool.give_back(first)
    assert pool.take() == first


def test_a_pool_of_any_size_costs_nothing_until_used() -> None:
    assert PagePool(2**40).take(3) == [0, 1, 2]


def test_an_accounting_error_is_caught_as_a_trivet_error() -> None:
    with pytest.raises(TrivetError):
        SlotPool(0).take()
