"""Buffers by name, length and dtype: the one place where sizes stand."""

from trivet.layout.buffers import AllocationMeter, Buffers, NoRoom
from trivet.layout.spec import BufferLayout, BufferSpec

__all__ = ["AllocationMeter", "BufferLayout", "BufferSpec", "Buffers", "NoRoom"]
