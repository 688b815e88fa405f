"""Sees torch allocate on a device whose allocator keeps no statistics (the CPU)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class NewStorages(TorchDispatchMode):
    """Notes every storage that operations touch while it is entered and that was not there before.

    Memory that torch only borrows (``torch.from_numpy``) is not counted: the CPU's arrays are not the device's.

    Args:
        known: storages that were there, by address.

    Attributes:
        found: operation, shape and dtype of each tensor over a new storage.
    """

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at what it took and gave."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.nbytes() and storage.resizable() and storage.data_ptr() not in self._known:
                    self.found.append(f"{func} {list(leaf.shape)} {leaf.dtype}")
        return result


def storages_within(value: object, depth: int = 4) -> set[int]:
    """Addresses of the storages of all tensors that can be reached from `value`'s attributes."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr()}
    if depth == 0:
        return set()
    return {pointer for child in _children(value) for pointer in storages_within(child, depth - 1)}


def _children(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    elif type(value).__module__.startswith(("builtins", "numpy")):
        return
    else:
        yield from getattr(value, "__dict__", {}).values()
        for name in getattr(type(value), "__slots__", ()):
            # An object of a compiled library may refuse to be looked into.
            held = None
            with suppress(Exception):
                held = getattr(value, name)
            yield held
