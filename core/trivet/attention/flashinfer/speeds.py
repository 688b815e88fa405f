"""The committed speed table: which kernel was measured to be faster, by device. Nothing is timed at start-up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from attrs import field, frozen

from trivet.attention.flashinfer.kinds import FewRows, LongChunks
from trivet.attention.flashinfer.splits import SplitShape
from trivet.capacity import DeviceProfile


@frozen
class HeadDimSpeeds:
    """What was measured for one head dim of a device.

    Attributes:
        compiled_groups: group sizes that the decode kernel was compiled for when it was probed there. Read only to
            plan for a device that is not here; on one that is here the library is asked.
        decode_over_prefill: time of the decode kernel over that of the paged-prefill kernel, by group size.
        hopper_from: from where on chunks are faster on the Hopper prefill kernel; None: never, or not measured.
        few_rows: up to how many decode rows the split-KV kernel is the faster one at most contexts, and how it cuts
            them, by group size.
        split_kv_over_prefill: time of the split-KV kernel over that of the paged-prefill kernel, by group size.
    """

    compiled_groups: tuple[int, ...]
    decode_over_prefill: Mapping[int, float] = field(hash=False)
    hopper_from: LongChunks | None
    split_kv_over_prefill: Mapping[int, float] = field(factory=dict, hash=False)
    few_rows: Mapping[int, tuple[FewRows, ...]] = field(factory=dict, hash=False)


@frozen
class SpeedTable:
    """Measurements by device and head dim.

    Attributes:
        devices: by lower-case device name, as drivers and shipped profiles give it.
    """

    devices: Mapping[str, Mapping[int, HeadDimSpeeds]] = field(hash=False)

    @classmethod
    def committed(cls) -> SpeedTable:
        """The table that ships as data (`speeds.json`), measured as `sdk_docs/evidence` says."""
        text = resources.files("trivet.attention.flashinfer").joinpath("speeds.json").read_text(encoding="utf-8")
        devices: dict[str, Mapping[int, HeadDimSpeeds]] = {}
        for entry in json.loads(text).values():
            by_head_dim = {int(head_dim): _head_dim(values) for head_dim, values in entry["head_dims"].items()}
            devices.update(dict.fromkeys(entry["names"], by_head_dim))
        return cls(devices)

    def of(self, device: DeviceProfile, head_dim: int) -> HeadDimSpeeds | None:
        """What was measured for `head_dim` on `device`, if anything was."""
        return self.devices.get(device.name.lower(), {}).get(head_dim)


def _head_dim(values: Mapping[str, Any]) -> HeadDimSpeeds:
    return HeadDimSpeeds(
        compiled_groups=tuple(values["compiled_groups"]),
        decode_over_prefill=_by_group(values["decode_over_prefill"]),
        hopper_from=None if values["hopper_from"] is None else LongChunks(**values["hopper_from"]),
        split_kv_over_prefill=_by_group(values["split_kv_over_prefill"]),
        few_rows={
            group: tuple(FewRows(few["rows"], SplitShape(**few["shape"])) for few in entry["up_to"])
            for entry in values["few_rows"]
            for group in entry["groups"]
        },
    )


def _by_group(ratios: Mapping[str, Any]) -> dict[int, float]:
    return {int(group): float(ratio) for group, ratio in ratios.items()}
