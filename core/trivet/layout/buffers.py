"""The tensors of a layout, owned together and released together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trivet.dtypes import as_torch
from trivet.errors import MemoryBudgetError
from trivet.layout.spec import BufferLayout

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


class AllocationMeter:
    """Counts allocations made through layouts; one per runtime, behind ``stats()["device_allocations"]``."""

    def __init__(self) -> None:
        self.allocations = 0
        self.allocated_bytes = 0

    def record(self, allocated_bytes: int) -> None:
        """Count one allocation."""
        self.allocations += 1
        self.allocated_bytes += allocated_bytes


class Buffers:
    """The allocated tensors of one layout: flat, one storage each, at stable addresses until `close`."""

    def __init__(self, layout: BufferLayout, tensors: dict[str, torch.Tensor]) -> None:
        self.layout = layout
        self._tensors = tensors

    @classmethod
    def allocate(
        cls, layout: BufferLayout, device: str | torch.device, meter: AllocationMeter | None = None
    ) -> Buffers:
        """Allocate `layout` on `device`, uninitialised. Pinned specs go to page-locked host memory.

        Raises:
            MemoryBudgetError: the device has no room, naming the buffer and its bytes.
        """
        import torch

        tensors: dict[str, torch.Tensor] = {}
        for spec in layout.specs:
            try:
                if spec.pinned:
                    tensor = torch.empty(spec.elements, dtype=as_torch(spec.dtype), pin_memory=True)
                else:
                    tensor = torch.empty(spec.elements, dtype=as_torch(spec.dtype), device=device)
            except RuntimeError as error:
                raise MemoryBudgetError(
                    f"{device} has no room for buffer {spec.name!r} of layout {layout.name!r} "
                    f"({spec.bytes} bytes): {str(error).splitlines()[0]}"
                ) from error
            if meter is not None:
                meter.record(spec.bytes)
            tensors[spec.name] = tensor
        return cls(layout, tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def fill(self, name: str, values: NDArray[Any]) -> torch.Tensor:
        """Copy `values` to the front of a buffer in host memory, in its dtype; returns the part that they fill.

        numpy writes them, which costs less than a copy between tensors.
        """
        filled = self._tensors[name][: len(values)]
        filled.numpy()[:] = values
        return filled

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def storage_bytes(self) -> int:
        """Bytes of the live storages, as torch reports them."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors.values())

    def pointers(self) -> dict[str, int]:
        """Address of each buffer, for tests of pointer stability."""
        return {name: tensor.data_ptr() for name, tensor in self._tensors.items()}

    def close(self) -> None:
        """Release every tensor. Idempotent."""
        self._tensors = {}
