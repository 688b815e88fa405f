"""The only place where buffer lengths stand: bytes are summed from a layout and tensors are allocated from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import field, frozen

from trivet import checked
from trivet.dtypes import item_bytes
from trivet.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from trivet.layout.buffers import AllocationMeter, Buffers


@frozen
class BufferSpec:
    """One flat buffer.

    Attributes:
        name: unique within its layout.
        elements: length in elements.
        dtype: element type by name, for example ``"int32"``.
        pinned: whether it is page-locked host memory, as staging for a CUDA device.
    """

    name: str
    elements: int
    dtype: str
    pinned: bool = False

    def __attrs_post_init__(self) -> None:
        checked.int64(self.name, self.elements * item_bytes(self.dtype))

    @property
    def bytes(self) -> int:
        """Length in bytes."""
        return self.elements * item_bytes(self.dtype)


def _specs(specs: Iterable[BufferSpec]) -> tuple[BufferSpec, ...]:
    return tuple(specs)


@frozen
class BufferLayout:
    """A named list of buffers. Both the reserved bytes and the allocated tensors are read off it.

    Raises:
        ConfigError: two specs share a name.
        CapacityExceeded: the byte count of a spec or the total does not fit int64.
    """

    name: str
    specs: tuple[BufferSpec, ...] = field(converter=_specs)

    def __attrs_post_init__(self) -> None:
        names = [spec.name for spec in self.specs]
        repeated = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
        if repeated:
            raise ConfigError(f"layout {self.name!r} lists {sorted(repeated)} more than once")
        checked.sum_bytes(self.name, (spec.bytes for spec in self.specs))

    @property
    def total_bytes(self) -> int:
        """Bytes of all buffers together."""
        return sum(spec.bytes for spec in self.specs)

    def spec(self, name: str) -> BufferSpec:
        """The spec called `name`; `ConfigError` if there is none."""
        for spec in self.specs:
            if spec.name == name:
                return spec
        raise ConfigError(f"layout {self.name!r} has no buffer {name!r}: it has {[s.name for s in self.specs]}")

    def with_elements(self, name: str, elements: int) -> BufferLayout:
        """The same layout with another length for `name`; for tests of what a wrong length does."""
        self.spec(name)
        specs = (
            BufferSpec(spec.name, elements, spec.dtype, spec.pinned) if spec.name == name else spec
            for spec in self.specs
        )
        return BufferLayout(self.name, tuple(specs))

    def allocate(self, device: str | torch.device, meter: AllocationMeter | None = None) -> Buffers:
        """Allocate every buffer on `device`, uninitialised, each in a storage of its own."""
        from trivet.layout.buffers import Buffers

        return Buffers.allocate(self, device, meter)
