"""How large one step may ever become: limits, device profile, capacity."""

from trivet.capacity.device import DeviceProfile
from trivet.capacity.limits import Limits
from trivet.capacity.plan import PlanCapacity, RuntimeCapacity, TileShape

__all__ = ["DeviceProfile", "Limits", "PlanCapacity", "RuntimeCapacity", "TileShape"]
