"""The tensors of a layout, owned together and released together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trivet.dtypes import as_torch
from trivet.errors import MemoryBudgetError
from trivet.layout.spec import BufferLayout

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


CPU_NO_ROOM = "DefaultCPUAllocator: can't allocate memory"
"""What torch says, in a plain RuntimeError, when the host has no memory left."""

CUDA_NO_ROOM = 2
"""cudaErrorMemoryAllocation, the code that comes with torch's error when the host has none to lock."""


class AllocationMeter:
    """Counts allocations made through layouts; one per runtime, behind ``stats()["device_allocations"]``."""

    def __init__(self) -> None:
        self.allocations = 0
        self.allocated_bytes = 0

    def record(self, allocated_bytes: int) -> None:
        """Count one allocation."""
        self.allocations += 1
        self.allocated_bytes += allocated_bytes


class NoRoom(MemoryBudgetError):
    """A device has no room for a buffer: names the buffer and its bytes. The runtime adds the ledger."""


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
            NoRoom: the device, or the host for pinned specs, has no room.
            RuntimeError: torch's own, where it refuses for any other reason.
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
                if not _says_no_room(error):
                    raise
                raise NoRoom(
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


def _says_no_room(error: RuntimeError) -> bool:
    """Whether torch has no memory left, by its type on a device, its text on a CPU, its code for page-locked memory."""
    import torch

    if isinstance(error, torch.OutOfMemoryError) or CPU_NO_ROOM in str(error):
        return True
    return isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) == CUDA_NO_ROOM
