"""The decode paths of the FlashInfer backend: where each is usable and why, and the owners that they bind."""

from __future__ import annotations

from attrs import field, frozen

from trivet.attention.flashinfer.bounds import query_tile
from trivet.attention.flashinfer.kinds import SERVED_DTYPES, SERVED_HEAD_DIMS, DecodeKernel, KernelChoice
from trivet.attention.flashinfer.layout import flashinfer_layout
from trivet.attention.flashinfer.library import TESTED_VERSION, missing_library
from trivet.attention.flashinfer.speeds import SpeedTable
from trivet.attention.protocol import PathRequest, PlanOwner, Verdict
from trivet.capacity import DeviceProfile, PlanCapacity, TileShape
from trivet.checked import INT32_MAX
from trivet.dtypes import item_bytes
from trivet.errors import ConfigError
from trivet.geometry import AttentionGeometry
from trivet.layout import BufferLayout, Buffers

OLDEST_COMPUTE_CAPABILITY = (8, 0)
HOPPER = 9
"""Major compute capability of the devices that the Hopper prefill kernel runs on."""


@frozen
class FlashInferPath:
    """Paged attention on FlashInfer's kernels, with decode rows on one of two.

    Attributes:
        decode: what decode rows run on. The decode kernel is compiled for a few group sizes, which are probed; the
            paged-prefill kernel serves all.
        speeds: what was measured to be faster; tests give others.
    """

    decode: DecodeKernel
    speeds: SpeedTable = field(factory=SpeedTable.committed)

    @property
    def name(self) -> str:
        """``"flashinfer-decode"`` or ``"flashinfer-prefill"``, after the kernel that serves decode rows."""
        return "flashinfer-decode" if self.decode is DecodeKernel.COMPILED else "flashinfer-prefill"

    @property
    def backend(self) -> str:
        """``"flashinfer"``."""
        return "flashinfer"

    def usable(self, need: PathRequest) -> Verdict:
        """By device, dtype, head dim, policy, library, and for the decode kernel what is compiled and what is faster.

        Imports the library only for a CUDA device that is here. For one that is not, the library is supposed to be
        there, and what was probed on such a device is read from the committed table.
        """
        refusal = self._refusal(need) or self._missing(need)
        if refusal is not None:
            return Verdict(False, refusal)
        if self.decode is DecodeKernel.COMPILED:
            return self._compiled(need)
        return Verdict(
            True,
            f"FlashInfer's paged-prefill kernel serves any group size, here {need.attention.group_size}, with decode "
            f"rows as rows of one token{self._supposed(need.device)}",
        )

    def tile(self, attention: AttentionGeometry) -> TileShape:
        """The smallest query tile. Splits of the KV are bounded by the multiprocessors, not by the context."""
        group = attention.group_size
        return TileShape(query_tokens=max(1, query_tile(group) // group), kv_tokens=INT32_MAX)

    def layout(self, capacity: PlanCapacity) -> BufferLayout:
        """Index arrays, workspaces and their pinned mirrors."""
        return flashinfer_layout(capacity, self.choice(capacity))

    def scratch_bytes(self, capacity: PlanCapacity, dtype: str) -> int:
        """The output of one attention call; everything else is in the layout."""
        return capacity.tokens * capacity.attention.query_elements * item_bytes(dtype)

    def bind(self, capacity: PlanCapacity, buffers: Buffers) -> PlanOwner:
        """The owner over `buffers`; loads the kernels, and builds what did not come built (minutes).

        Raises:
            CapacityExceeded: a workspace is smaller than what the library asks for.
            ConfigError: the library cannot be used here, or a kernel cannot be built.
        """
        missing = missing_library()
        if missing is not None:
            raise ConfigError(f"decode path {self.name!r}: {missing}")
        from trivet.attention.flashinfer.kernels import load_kernels
        from trivet.attention.flashinfer.owner import FlashInferOwner

        choice = self.choice(capacity)
        try:
            kernels = load_kernels(capacity, choice)
        except RuntimeError as error:
            raise ConfigError(
                f"decode path {self.name!r}: FlashInfer {TESTED_VERSION} cannot build its kernels for "
                f"{capacity.dtype}, head dim {capacity.head_dim}: {error}"
            ) from error
        owner: FlashInferOwner = FlashInferOwner(capacity, buffers, kernels, long_from=choice.hopper_from)
        return owner

    def choice(self, capacity: PlanCapacity) -> KernelChoice:
        """The kernels that a plan of `capacity` runs on."""
        if capacity.device is None:
            return KernelChoice(self.decode)
        return self._choice(capacity.device, capacity.head_dim)

    def _choice(self, device: DeviceProfile, head_dim: int) -> KernelChoice:
        speeds = self.speeds.of(device, head_dim)
        hopper = device.compute_capability is not None and device.compute_capability[0] == HOPPER
        return KernelChoice(self.decode, speeds.hopper_from if speeds is not None and hopper else None)

    def _refusal(self, need: PathRequest) -> str | None:
        """What is known without the library."""
        device, capability = need.device, need.device.compute_capability
        if device.kind != "cuda":
            return f"FlashInfer runs on CUDA devices, and {device.name} is none"
        if capability is not None and capability < OLDEST_COMPUTE_CAPABILITY:
            return f"{device.name} has compute capability {capability[0]}.{capability[1]}, FlashInfer needs 8.0"
        if need.dtype not in SERVED_DTYPES:
            return f"FlashInfer is served in {' and '.join(SERVED_DTYPES)}, not in {need.dtype}"
        if need.attention.head_dim not in SERVED_HEAD_DIMS:
            served = ", ".join(map(str, SERVED_HEAD_DIMS))
            return f"head dim {need.attention.head_dim} is not among those that FlashInfer is tested for ({served})"
        if need.numeric_policy == "pinned":
            return (
                "FlashInfer's planners split a row's keys by what else is in the step, so that results depend on the "
                "batch; use numeric_policy='tuned'"
            )
        return None

    def _missing(self, need: PathRequest) -> str | None:
        """What the library lacks on a device that is here."""
        if not need.device.present:
            return None
        missing = missing_library()
        if missing is not None:
            return missing
        from trivet.attention.flashinfer.probe import missing_kernels

        choice = self._choice(need.device, need.attention.head_dim)
        return missing_kernels(need.dtype, need.attention.head_dim, choice)

    def _compiled(self, need: PathRequest) -> Verdict:
        group, head_dim = need.attention.group_size, need.attention.head_dim
        speeds = self.speeds.of(need.device, head_dim)
        ratio = speeds.decode_over_prefill.get(group) if speeds is not None else None
        if ratio is not None and ratio > 1:
            return Verdict(
                False,
                f"on {need.device.name} the decode kernel takes {ratio:.2f} times as long as the paged-prefill kernel "
                f"for group size {group} at head dim {head_dim} (committed speed table)",
            )
        if need.device.present:
            from trivet.attention.flashinfer.probe import decode_compiles

            compiled, how = decode_compiles(need.dtype, head_dim, group), f"probed on {need.device.name}"
        elif speeds is not None:
            compiled, how = group in speeds.compiled_groups, f"as probed before on {need.device.name}"
        else:
            return Verdict(
                False,
                f"which group sizes the decode kernel is compiled for is probed on the device: {need.device.name} is "
                "not here, and no probe of such a device is recorded",
            )
        if not compiled:
            return Verdict(False, f"FlashInfer's decode kernel is not compiled for group size {group} ({how})")
        measured = "was never measured against" if ratio is None else f"takes {ratio:.2f} times as long as"
        return Verdict(
            True,
            f"FlashInfer's decode kernel is compiled for group size {group} ({how}) and {measured} the paged-prefill "
            f"kernel at head dim {head_dim}{self._supposed(need.device)}",
        )

    @staticmethod
    def _supposed(device: DeviceProfile) -> str:
        return "" if device.present else f"; {device.name} is not here: FlashInfer {TESTED_VERSION} is supposed there"
