"""Take a lock if it is free, so that no interrupt leaves it taken."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast


class Attempt:
    """Taking `lock`, a ``threading.RLock``, where nobody else holds it.

    ``with attempt.take as taken`` says whether it is taken; ``with attempt.taken`` gives it back at its end. An
    interrupt is handled between two instructions of Python, so that one may come between a call of ``acquire`` and the
    ``try`` behind it. What is called here on the way in and out is written in C, as in a plain ``with lock``.
    """

    def __init__(self, lock: Any) -> None:
        self.take = cast("AbstractContextManager[bool]", _manager(partial(lock.acquire, False), _nothing))
        self.taken = cast("AbstractContextManager[object]", _manager(int, lock.__exit__))


def _manager(enter: Any, leave: Any) -> object:
    return type("Manager", (), {"__enter__": staticmethod(enter), "__exit__": staticmethod(leave)})()


def _nothing(*exception: object) -> None:
    """The lock is given back by whoever was told that it is taken."""
