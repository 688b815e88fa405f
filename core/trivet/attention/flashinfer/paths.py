"""The decode paths of the FlashInfer backend: where each is usable and why, and the owners that they bind."""

from __future__ import annotations

from collections.abc import Callable

from attrs import field, frozen

from trivet.attention.flashinfer.bounds import query_tile
from trivet.attention.flashinfer.kinds import SERVED_DTYPES, SERVED_HEAD_DIMS, DecodeKernel, KernelChoice
from trivet.attention.flashinfer.layout import FLOAT_WORKSPACE, flashinfer_layout
from trivet.attention.flashinfer.library import TESTED_VERSION, missing_library
from trivet.attention.flashinfer.speeds import SpeedTable
from trivet.attention.protocol import PathRequest, PlanOwner, Verdict
from trivet.capacity import DeviceProfile, PlanCapacity, TileShape
from trivet.checked import INT32_MAX
from trivet.dtypes import item_bytes
from trivet.errors import ConfigError
from trivet.geometry import AttentionGeometry
from trivet.installed import missing_triton
from trivet.layout import BufferLayout, Buffers

OLDEST_COMPUTE_CAPABILITY = (8, 0)
HOPPER = 9
"""Major compute capability of the devices that the Hopper prefill kernel runs on."""


NAMES = {
    DecodeKernel.COMPILED: "flashinfer-decode",
    DecodeKernel.PAGED_PREFILL: "flashinfer-prefill",
    DecodeKernel.SPLIT_KV: "split-kv-decode",
}
PINNED_NAME = "split-kv-pinned"


@frozen
class FlashInferPath:
    """Paged attention on FlashInfer's kernels, with decode rows on one of two of them or on one of ours.

    Attributes:
        decode: what decode rows run on. The decode kernel is compiled for a few group sizes, which are probed; the
            paged-prefill kernel and the split-KV kernel serve all.
        speeds: what was measured to be faster; tests give others.
        forced: whether it serves wherever its kernels can, whatever was measured; for tests and benchmarks, which
            compare the kernels.
        pinned: whether it serves the ``pinned`` policy, and that alone: every token, those of chunks too, on the
            split-KV kernel.

    Raises:
        ConfigError: it is pinned, and decode rows run on another kernel.
    """

    decode: DecodeKernel
    speeds: SpeedTable = field(factory=SpeedTable.committed)
    forced: bool = field(default=False, kw_only=True)
    pinned: bool = field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.pinned and self.decode is not DecodeKernel.SPLIT_KV:
            raise ConfigError(f"decode path {self.name!r}: the {self.decode.value} cannot serve the pinned policy")

    @property
    def name(self) -> str:
        """After the kernel that serves decode rows, for example ``"flashinfer-prefill"`` or ``"split-kv-decode"``."""
        return PINNED_NAME if self.pinned and self.decode is DecodeKernel.SPLIT_KV else NAMES[self.decode]

    @property
    def backend(self) -> str:
        """``"flashinfer"``."""
        return "flashinfer"

    @property
    def captures(self) -> bool:
        """True: decode plans depend on the number of rows alone."""
        return True

    def usable(self, need: PathRequest) -> Verdict:
        """By device, dtype, head dim, policy, library, what is compiled, and what was measured to be faster.

        Imports the library only for a CUDA device that is here. For one that is not, the library is supposed to be
        there, and what was probed on such a device is read from the committed table.
        """
        refusal = self._refusal(need) or self._missing(need)
        if refusal is not None:
            return Verdict(False, refusal)
        if self.decode is DecodeKernel.COMPILED:
            return self._compiled(need)
        if self.decode is DecodeKernel.SPLIT_KV:
            return self._split_kv(need)
        return Verdict(
            True,
            f"FlashInfer's paged-prefill kernel serves any group size, here {need.attention.group_size}, with decode "
            f"rows as rows of one token{self._few_rows(need)}{self._supposed(need.device)}",
        )

    def _few_rows(self, need: PathRequest) -> str:
        few = self._choice(need.device, need.attention).few_rows
        if not few:
            return ""
        return f"; steps of up to {few[-1].rows} of them run on the split-KV kernel (committed speed table)"

    def tile(self, attention: AttentionGeometry) -> TileShape:
        """The smallest query tile. Splits of the KV are bounded by the multiprocessors, not by the context."""
        group = attention.group_size
        return TileShape(query_tokens=max(1, query_tile(group) // group), kv_tokens=INT32_MAX)

    def layout(self, capacity: PlanCapacity) -> BufferLayout:
        """Index arrays, workspaces and their pinned mirrors."""
        return flashinfer_layout(capacity, self.choice(capacity))

    def builds(self, capacity: PlanCapacity) -> list[tuple[str, Callable[[], object]]]:
        """The kernels of a plan of `capacity` that are not built yet: their names, and what builds each (minutes).

        Raises:
            ConfigError: the library cannot be used here.
        """
        missing = missing_library()
        if missing is not None:
            raise ConfigError(f"decode path {self.name!r}: {missing}")
        from trivet.attention.flashinfer.kernels import unbuilt

        assert capacity.dtype is not None
        return unbuilt(capacity.dtype, capacity.head_dim, self.choice(capacity))

    def scratch_bytes(self, capacity: PlanCapacity, dtype: str) -> int:
        """The output of one attention call; everything else is in the layout."""
        return capacity.tokens * capacity.attention.query_elements * item_bytes(dtype)

    def bind(self, capacity: PlanCapacity, buffers: Buffers) -> PlanOwner:
        """The owner over `buffers`; loads the kernels, and builds what did not come built (minutes).

        Raises:
            CapacityExceeded: a workspace is smaller than what the library asks for.
            ConfigError: the library cannot be used here, or a kernel cannot be built.
        """
        missing = self._missing_package()
        if missing is not None:
            raise ConfigError(f"decode path {self.name!r}: {missing}")
        from trivet.attention.flashinfer.kernels import load_kernels
        from trivet.attention.flashinfer.owner import FlashInferOwner

        choice = self.choice(capacity)
        try:
            kernels = load_kernels(capacity, choice, buffers[FLOAT_WORKSPACE].device)
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
            return KernelChoice(self.decode, pinned=self.pinned)
        return self._choice(capacity.device, capacity.attention)

    def _choice(self, device: DeviceProfile, attention: AttentionGeometry) -> KernelChoice:
        if self.pinned:
            return KernelChoice(self.decode, pinned=True)
        speeds = self.speeds.of(device, attention.head_dim)
        if speeds is None:
            return KernelChoice(self.decode)
        hopper = device.compute_capability is not None and device.compute_capability[0] == HOPPER
        beside = self.decode is not DecodeKernel.SPLIT_KV and not self.forced
        beside = beside and not (device.present and missing_triton())
        return KernelChoice(
            self.decode,
            speeds.hopper_from if hopper else None,
            few_rows=speeds.few_rows.get(attention.group_size, ()) if beside else (),
        )

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
        if need.numeric_policy == "pinned" and not self.pinned:
            return (
                "FlashInfer's planners split a row's keys by what else is in the step, so that results depend on the "
                "batch; use numeric_policy='tuned'"
            )
        if need.numeric_policy != "pinned" and self.pinned:
            return "it serves a chunk token by token, which is slow, and is there for numeric_policy='pinned' alone"
        return None

    def _missing(self, need: PathRequest) -> str | None:
        """What the library lacks on a device that is here."""
        if not need.device.present:
            return None
        missing = self._missing_package()
        if missing is not None:
            return missing
        from trivet.attention.flashinfer.probe import missing_kernels

        choice = self._choice(need.device, need.attention)
        return missing_kernels(need.dtype, need.attention.head_dim, choice)

    def _missing_package(self) -> str | None:
        return missing_library() or (missing_triton() if self.decode is DecodeKernel.SPLIT_KV else None)

    def _split_kv(self, need: PathRequest) -> Verdict:
        group, head_dim = need.attention.group_size, need.attention.head_dim
        kernel, shape = "the split-KV kernel", f"for group size {group} at head dim {head_dim}"
        if self.pinned:
            return Verdict(
                True,
                f"{kernel} cuts a row's keys by the row's own length, so that no result depends on the batch or on "
                f"chunking{self._supposed(need.device)}",
            )
        if self.forced:
            return Verdict(True, f"{kernel} serves any group size, here {group}, and was asked for whatever its speed")
        speeds = self.speeds.of(need.device, head_dim)
        ratio = speeds.split_kv_over_prefill.get(group) if speeds is not None else None
        if speeds is None or ratio is None:
            few = speeds.few_rows.get(group, ()) if speeds is not None else ()
            return Verdict(
                False,
                f"no speed of {kernel} over all numbers of rows is committed on {need.device.name} {shape}"
                + (f"; steps of up to {few[-1].rows} rows run on it through FlashInfer's other paths" if few else ""),
            )
        other = speeds.decode_over_prefill.get(group)
        if other is not None and other < min(ratio, 1):
            return Verdict(
                False,
                f"on {need.device.name} {kernel} takes {ratio / other:.2f} times as long as FlashInfer's decode kernel "
                f"{shape} (committed speed table)",
            )
        return Verdict(
            ratio <= 1,
            f"on {need.device.name} {kernel} takes {ratio:.2f} times as long as the paged-prefill kernel {shape} "
            f"(committed speed table){self._supposed(need.device) if ratio <= 1 else ''}",
        )

    def _compiled(self, need: PathRequest) -> Verdict:
        group, head_dim = need.attention.group_size, need.attention.head_dim
        speeds = self.speeds.of(need.device, head_dim)
        ratio = speeds.decode_over_prefill.get(group) if speeds is not None else None
        if ratio is not None and ratio > 1 and not self.forced:
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
