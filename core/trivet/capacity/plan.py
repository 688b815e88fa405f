"""How large one step may ever become, computed once.

`RuntimeCapacity` is the one value that the profile, the reserve, the serving allocation and admission hold. It
carries one `PlanCapacity` per distinct attention geometry: the dimensions of that geometry's plan.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import field, frozen

from trivet import checked
from trivet.capacity.device import DeviceProfile
from trivet.capacity.limits import Limits
from trivet.errors import ConfigError
from trivet.geometry import AttentionGeometry, ModelGeometry

NUMERIC_POLICIES = ("tuned", "pinned")


@frozen
class TileShape:
    """The smallest pieces into which a kernel may cut a row's work.

    Attributes:
        query_tokens: a row that needs more than one query tile fills each but its last with at least this many.
        kv_tokens: keys per KV tile, counted from position 0.
    """

    query_tokens: int
    kv_tokens: int

    def __attrs_post_init__(self) -> None:
        if self.query_tokens < 1 or self.kv_tokens < 1:
            raise ConfigError(f"tile shape: {self} has a side below 1")


@frozen(eq=False)
class PlanCapacity:
    """The dimensions of one plan: how many of everything the worst step can need.

    Compared by identity: everything that sizes or checks a step holds the same object.

    Attributes:
        attention: the attention geometry that the plan serves.
        limits: what the operator allows.
        tile: the smallest tiles that the kernel may derive.
        device: the device, for paths whose workspaces depend on it; None where none was named.
        dtype: dtype of queries, keys and values; None where none was named.
        requests: rows in one step.
        tokens: tokens in one step, over all rows.
        positions: positions of one request: 0 to ``positions - 1``.
        pages_per_request: pages of one row.
        pages: page-list entries of all rows together. Logical (invariant 2): not the size of the pool.
        indptr: length of an index-pointer array over rows.
        query_tiles: query tiles that the worst mix of rows needs.
        kv_tiles: KV tiles of the longest context.
        tiles: work items, ``query_tiles * kv_tiles``.
    """

    attention: AttentionGeometry
    limits: Limits
    tile: TileShape
    device: DeviceProfile | None = field(default=None, kw_only=True)
    dtype: str | None = field(default=None, kw_only=True)
    requests: int = field(init=False)
    tokens: int = field(init=False)
    positions: int = field(init=False)
    pages_per_request: int = field(init=False)
    pages: int = field(init=False)
    indptr: int = field(init=False)
    query_tiles: int = field(init=False)
    kv_tiles: int = field(init=False)
    tiles: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        limits, tile = self.limits, self.tile
        tokens, rows = limits.step_tokens, limits.step_rows
        # The worst mix: as many rows as fit, one token each; every further `query_tokens` tokens add one tile to
        # some row, until each row's context is full.
        tiles_per_row = checked.ceil_div(limits.max_context, tile.query_tokens)
        query_tiles = rows + min((tokens - rows) // tile.query_tokens, rows * (tiles_per_row - 1))
        kv_tiles = checked.ceil_div(limits.max_context, tile.kv_tokens)
        for name, value in {
            "requests": limits.max_requests,
            "indptr": limits.max_requests + 1,
            "tokens": tokens,
            "positions": limits.max_context,
            "pages_per_request": limits.pages_per_request,
            "pages": limits.logical_pages,
            "query_tiles": query_tiles,
            "kv_tiles": kv_tiles,
            "tiles": query_tiles * kv_tiles,
        }.items():
            object.__setattr__(self, name, checked.int32(name, value))
        checked.int32("query_heads", self.query_heads)
        checked.int32("head_dim", self.head_dim)
        checked.int64("query elements of a step", tokens * self.attention.query_elements * 8)

    @property
    def query_heads(self) -> int:
        """Query heads of a row."""
        return self.attention.query_heads

    @property
    def kv_heads(self) -> int:
        """KV heads of a row."""
        return self.attention.kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.attention.head_dim


@frozen(eq=False)
class RuntimeCapacity:
    """Geometry x limits x device profile x numeric policy x graph buckets: one immutable value.

    Compared by identity (invariant 1): the profile, the reserve, the owners and admission hold this object.

    Attributes:
        geometry: what the model is.
        limits: what the operator allows.
        device: what sizes depend on in the device.
        dtype: dtype of weights, activations and KV cache.
        numeric_policy: ``"tuned"`` or ``"pinned"``.
        graph_buckets: batch sizes with a captured CUDA graph, ascending; empty without graphs.
        fused_recurrence: whether recurrent layers, of which there are some, are served by fused kernels alone.
        plans: one per distinct attention geometry, in order of first use.
        step_tokens: tokens that one step may compute.
        step_rows: rows that one step may hold.
        logit_rows: rows of logits computed at once; scoring works in blocks of it.
    """

    geometry: ModelGeometry
    limits: Limits
    device: DeviceProfile
    dtype: str
    numeric_policy: str
    graph_buckets: tuple[int, ...]
    fused_recurrence: bool
    plans: tuple[PlanCapacity, ...]
    step_tokens: int
    step_rows: int
    logit_rows: int

    @classmethod
    def of(
        cls,
        geometry: ModelGeometry,
        limits: Limits,
        device: DeviceProfile,
        *,
        dtype: str,
        tile_of: Callable[[AttentionGeometry], TileShape],
        numeric_policy: str = "tuned",
        graph_buckets: tuple[int, ...] = (),
        fused_recurrence: bool = False,
    ) -> RuntimeCapacity:
        """Compute every dimension once.

        Args:
            tile_of: the tile shape of the decode path that serves an attention geometry.

        Raises:
            ConfigError: unknown numeric policy, or a context longer than int32 positions.
            CapacityExceeded: a dimension does not fit the int32 that kernels take; it is named.
        """
        if numeric_policy not in NUMERIC_POLICIES:
            raise ConfigError(f"numeric_policy is {numeric_policy!r}, expected one of {', '.join(NUMERIC_POLICIES)}")
        step_tokens, step_rows = limits.step_tokens, limits.step_rows
        logit_rows = max(step_rows, min(step_tokens, SCORE_BLOCK_ROWS))
        checked.int32("vocabulary", geometry.vocab_size)
        checked.int64("logits of a step", logit_rows * geometry.vocab_size * 8)
        plans = tuple(
            PlanCapacity(a, limits, tile_of(a), device=device, dtype=dtype) for a in geometry.attention_geometries
        )
        return cls(
            geometry=geometry,
            limits=limits,
            device=device,
            dtype=dtype,
            numeric_policy=numeric_policy,
            graph_buckets=tuple(sorted(graph_buckets)),
            fused_recurrence=fused_recurrence,
            plans=plans,
            step_tokens=checked.int32("tokens", step_tokens),
            step_rows=step_rows,
            logit_rows=logit_rows,
        )

    @property
    def prompt_buckets(self) -> tuple[int, ...]:
        """Tokens of the captured steps of one short prompt, ascending.

        Each token takes a row of the attention plans, so that only numbers of decode rows that are captured are there.
        Recurrent layers are captured with their fused kernels alone: without them there are none.
        """
        if self.geometry.hybrid and not self.fused_recurrence:
            return ()
        return tuple(size for size in self.graph_buckets if size in SHORT_PROMPTS and size <= self.step_tokens)

    def plan(self, attention: AttentionGeometry) -> PlanCapacity:
        """The plan capacity that serves `attention`."""
        for plan in self.plans:
            if plan.attention == attention:
                return plan
        raise ConfigError(f"no plan serves attention geometry {attention.label}: it is in no layer of the model")


SHORT_PROMPTS = (16, 64)
"""Tokens of a prompt, or of what a prefix-cache hit leaves of it, that are worth a graph; 64 is one chunk of a
recurrent layer."""

SCORE_BLOCK_ROWS = 32
"""Rows of logits that `score` computes at once when the batch itself is narrower."""
