"""The plan-owner protocol, and the decode path that couples a predicate, a layout and an owner."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from attrs import frozen

from trivet.attention.batch import StepBatch
from trivet.capacity import DeviceProfile, PlanCapacity, TileShape
from trivet.geometry import AttentionGeometry
from trivet.layout import BufferLayout, Buffers

if TYPE_CHECKING:
    import torch


class Replan(Enum):
    """What `PlanOwner.update` did."""

    KEPT = "kept"
    """The plan in place serves this step as it is."""
    REPLANNED = "replanned"
    """The buffers were refilled in place."""


@frozen
class Verdict:
    """Whether a decode path is usable here, and why.

    Attributes:
        ok: yes or no.
        reason: one sentence for people, for either answer.
    """

    ok: bool
    reason: str


@frozen
class PathRequest:
    """What a decode path is asked to serve.

    Attributes:
        attention: the attention geometry.
        device: where it would run.
        dtype: dtype of queries, keys and values.
        numeric_policy: ``"tuned"`` or ``"pinned"``.
        page_size: tokens per page.
        backend: the backend that the operator named, or None to let predicates choose.
    """

    attention: AttentionGeometry
    device: DeviceProfile
    dtype: str
    numeric_policy: str
    page_size: int
    backend: str | None = None


@runtime_checkable
class PlanOwner(Protocol):
    """The one object that holds a plan's buffers, refills them in place and never allocates while serving.

    One per distinct attention geometry. Its pointers do not change between binding and `close`.
    """

    @property
    def capacity(self) -> PlanCapacity:
        """The capacity object that sized the buffers."""

    @property
    def buffers(self) -> Buffers:
        """The buffers that the plan lives in."""

    @property
    def positions(self) -> torch.Tensor:
        """int32 ``[tokens]``: position of each token of the step, a view of one of the plan's own buffers."""

    def update(self, batch: StepBatch) -> Replan:
        """Refill the plan in place for `batch`, whose arrays are the caller's: copy what is read after this call.

        Everything is compared before anything is written, in this order: ``query_heads``, ``kv_heads``, ``requests``
        (rows), ``indptr`` (entries of ``page_indptr``), ``tokens``, ``positions`` (the longest context),
        ``pages_per_request``, ``pages`` (entries of ``page_indices``), whether the arrays agree, ``tiles``. Each is an
        attribute of `PlanCapacity`, and `trivet.plugin.check_batch` does all of it. Then each buffer's length as it was
        bound with what is to be written there, under the buffer's own name.

        Raises:
            CapacityExceeded: the batch is larger than the capacity, or than a buffer, in the named dimension, the first
                of those above. The plan is unchanged.
            ConfigError: the arrays of the batch contradict each other. The plan is unchanged.
            RuntimeDown: the owner was closed.
        """

    def append(self, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's keys and values to their pages.

        Args:
            key, value: ``[tokens, kv_heads, head_dim]``.
            keys, values: one layer's cache, ``[pages, page_size, kv_heads, head_dim]``.
        """

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Causal attention of the step's queries over their rows' contexts.

        Args:
            query: ``[tokens, query_heads, head_dim]``.
            keys, values: one layer's cache, as in `append`.

        Returns:
            ``[tokens, query_heads, head_dim]`` in the dtype of `query`.
        """

    def close(self) -> None:
        """Release the buffers. Idempotent; a later `update` raises `RuntimeDown`."""


@runtime_checkable
class DecodePath(Protocol):
    """Couples a predicate, a layout and an owner. ``sdk_docs/decode_paths.md`` writes one.

    The runtime asks `usable`, takes the first path that says yes, makes a `PlanCapacity` with its `tile`, counts
    `layout` and `scratch_bytes` in the ledger, allocates the layout and hands it to `bind`.

    Decode steps are captured in CUDA graphs where a path says so by an attribute beside these, ``captures = True``.
    Its owners then have one method more than `PlanOwner`: ``note_capture() -> None``, called after a pure decode step
    was captured on the plan in place. From then on an `update` to as many decode rows and no others either leaves grid
    and buffers such that a replay computes the new step, or raises.

    Owners may say where a step's tokens go in the cache, by ``token_places(rows: torch.Tensor) -> TokenPlaces``; `rows`
    has a row for each token of the plan in place. On CUDA devices, in bfloat16 and float16, one kernel then norms,
    rotates and writes keys and values of the shared layers, and `append` is not called for them. Without the method
    each of these is an operation of its own, which is slower.
    """

    @property
    def name(self) -> str:
        """Name in reports and ledgers, for example ``"reference"``."""

    @property
    def backend(self) -> str:
        """Name of the attention backend that it belongs to."""

    def usable(self, need: PathRequest) -> Verdict:
        """Whether this path serves `need`, and why. Must not allocate."""

    def tile(self, attention: AttentionGeometry) -> TileShape:
        """The smallest tiles that the path's kernel may derive."""

    def layout(self, capacity: PlanCapacity) -> BufferLayout:
        """Every buffer that the owner needs. The only place where their lengths stand."""

    def scratch_bytes(self, capacity: PlanCapacity, dtype: str) -> int:
        """Bound on the temporaries of one `attend` or `append`, in bytes; part of the activation line."""

    def bind(self, capacity: PlanCapacity, buffers: Buffers) -> PlanOwner:
        """Make the owner over buffers that were allocated from `layout(capacity)`."""
