"""Measure the temporaries of a step on a device whose allocator keeps no statistics (the CPU)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class StorageMeter(TorchDispatchMode):
    """Counts the bytes of storages that tensor operations create while it is entered.

    A storage lives as long as any tensor over it does. Storages that were there before are not counted, and what an
    operation allocates and frees inside itself is not seen.

    Attributes:
        live_bytes: bytes of the counted storages that are alive now.
        peak_bytes: the most that were alive at once, since the last `restart`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._counted_as: dict[int, int] = {}
        self._counted = 0
        self._users: dict[int, int] = {}

    def restart(self) -> None:
        """Begin another peak, at what is alive now."""
        self.peak_bytes = self.live_bytes

    def mark(self) -> int:
        """This moment, for `bytes_since`."""
        return self._counted

    def bytes_since(self, mark: int, tensor: torch.Tensor) -> int:
        """Bytes of the storage of `tensor`, where it was made after `mark` and is counted; otherwise 0."""
        pointer = tensor.untyped_storage().data_ptr()
        return self._sizes[pointer] if self._counted_as.get(pointer, 0) > mark else 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while this is entered. True, torch's default, imports its compiler: two seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, then count the storages among its results that were not among its inputs."""
        kwargs = kwargs or {}
        # Of this operation alone: an address that was another's is free for a counted storage once that one is gone.
        foreign = {
            leaf.untyped_storage().data_ptr() for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)
        } - self._users.keys()
        result = func(*args, **kwargs)
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, foreign)
        return result

    def _see(self, tensor: torch.Tensor, foreign: set[int]) -> None:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer == 0 or pointer in foreign:
            return
        if pointer not in self._users:
            self._counted += 1  # an address may be that of one storage after another
            self._counted_as[pointer] = self._counted
            self._users[pointer] = 0
            self._sizes[pointer] = storage.nbytes()
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._users[pointer] += 1
        weakref.finalize(tensor, self._forget, pointer)

    def _forget(self, pointer: int) -> None:
        self._users[pointer] -= 1
        if not self._users[pointer]:
            del self._users[pointer], self._counted_as[pointer]
            self.live_bytes -= self._sizes.pop(pointer)
