"""What the fused kernels of recurrent layers keep alive stays within its planned bound, which is no wider than it.

Also runs interpreted, on a machine without a device: ``TRITON_INTERPRET=1``, ``--noconftest``.
"""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from tests.support.delta import DEVICE, PUBLISHED, DeltaLayer

from trivet.caches.state import PADDING_SLOTS, StateCut, StatePool, state_layout
from trivet.capacity import DeviceProfile, Limits, RuntimeCapacity, TileShape
from trivet.capacity.chunks import MOST_CUTS_PER_ROW
from trivet.dtypes import as_torch
from trivet.geometry import ModelGeometry, RecurrentGeometry
from trivet.layers import context
from trivet.layers.context import StepContext
from trivet.ops.packed import PackedRows
from trivet.reservation.cuda import GRAPH_POOL_SLACK_BYTES, graph_pool_bytes
from trivet.reservation.recurrent import fused_recurrent_bytes
from trivet.runtime.meter import StorageMeter

ON_DEVICE = DEVICE == "cuda"
DTYPE = "bfloat16" if ON_DEVICE else "float16"
"""The interpreter multiplies matrices of bfloat16 wrongly."""

WIDTH = 2
NARROW = RecurrentGeometry(key_heads=1, value_heads=2, key_dim=8, value_dim=4, conv_kernel=1)
SMALL = RecurrentGeometry(key_heads=2, value_heads=4, key_dim=32, value_dim=64, conv_kernel=3)
UNEVEN = RecurrentGeometry(key_heads=1, value_heads=3, key_dim=72, value_dim=40, conv_kernel=4)
GEOMETRIES = [NARROW, SMALL, UNEVEN, *([PUBLISHED] if ON_DEVICE else [])]


@frozen
class Mix:
    """Rows of a step: decode rows, then others, cut at multiples of a grain of contexts that begin anywhere."""

    lengths: tuple[int, ...]
    decode_rows: int
    cuts: tuple[StateCut, ...] = ()
    grain_tokens: int = 1


def cut(row: int, *places: int) -> tuple[StateCut, ...]:
    return tuple(StateCut(row, tokens, MOST_CUTS_PER_ROW * row + i) for i, tokens in enumerate(places))


MIXES = {
    "one token": Mix((1,), 1),
    "decode rows alone": Mix((1,) * 9, 9),
    "one prompt": Mix((150,), 0),
    "whole chunks": Mix((128, 64), 0),
    "as profiled": Mix((1, 1, 1, 131), 3),
    "prompts of one token": Mix((1,) * 6, 0),
    "cut behind the first token": Mix((*(2,) * 5, 80), 0, sum((cut(row, 1) for row in range(6)), ()), 64),
    "cut twice, two tokens apart": Mix((4,) * 4, 0, sum((cut(row, 1, 3) for row in range(4)), ()), 2),
    "cut twice, a chunk apart": Mix((1, 66, 66), 1, cut(1, 1, 65) + cut(2, 1, 65), 64),
}
WORST = ("decode rows alone", "prompts of one token", "cut behind the first token")
LOOSEST = 1.02
"""Times what the worst mixes take: tables are planned for segments that do not all come at once."""


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels serve, interpreted where there is no device."""
    if not ON_DEVICE:
        from tests.support.interpreter import serve_as_loop_bounds

        from trivet.ops.fused import kernels

        serve_as_loop_bounds(monkeypatch)
        monkeypatch.setattr(context, "fused_kernels", lambda x: kernels)


def model_of(recurrent: RecurrentGeometry) -> ModelGeometry:
    return ModelGeometry(
        model_type="recurrent",
        dtype=DTYPE,
        vocab_size=8,
        hidden_size=1,
        intermediate_size=1,
        layers=(recurrent,),
        norm_eps=1e-6,
        max_positions=4096,
        tied_embeddings=True,
    )


def peak_bytes(recurrent: RecurrentGeometry, mix: Mix) -> int:
    """What one layer keeps alive from its projection on, with the table of the rows."""
    geometry, rows = model_of(recurrent), len(mix.lengths)
    layer = DeltaLayer.drawn(recurrent, rows, as_torch(DTYPE), seed=rows)
    slots, snapshots = (
        state_layout(name, geometry, count, DTYPE).allocate(torch.device(DEVICE))
        for name, count in (("state", rows + PADDING_SLOTS), ("snapshots", MOST_CUTS_PER_ROW * rows))
    )
    state = StatePool(geometry, slots, snapshots)
    state.clear(range(rows))
    step = StepContext(
        geometry=geometry,
        owners={},
        rotary={},
        cache=None,  # type: ignore[arg-type]
        state=state,
        rows=PackedRows(mix.lengths, DEVICE, cuts=mix.cuts),
        decode_rows=mix.decode_rows,
        slots=torch.arange(rows, device=DEVICE),
    )
    drawn = layer.projected(sum(mix.lengths))
    with torch.inference_mode(), StorageMeter() as meter:
        projected = drawn.clone()
        out = step.delta_rule_projected(
            0,
            recurrent,
            projected,
            conv_weight=layer.conv_weight,
            a_log=layer.a_log,
            dt_bias=layer.dt_bias,
            norm_weight=layer.norm_weight,
            norm_eps=1e-6,
        )
    assert out is not None and not out.isnan().any()
    return meter.peak_bytes + table_bytes_unseen(step.rows, mix)


def table_bytes_unseen(rows: PackedRows, mix: Mix) -> int:
    """Bytes of the table that no operation makes, where there is no device that it is copied to."""
    if ON_DEVICE or mix.decode_rows == rows.rows:
        return 0
    values, _ = rows.table_values(mix.decode_rows)
    return int(values.nbytes)


def bound_bytes(recurrent: RecurrentGeometry, mix: Mix) -> int:
    rows = len(mix.lengths)
    chunked_rows = 0 if mix.decode_rows == rows else rows
    return fused_recurrent_bytes(recurrent, sum(mix.lengths), rows, chunked_rows, WIDTH, mix.grain_tokens)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize(
    "recurrent", GEOMETRIES, ids=lambda g: f"{g.key_heads}-{g.value_heads}x{g.key_dim}-{g.value_dim}"
)
def test_no_mix_of_rows_keeps_more_alive_than_was_planned(recurrent: RecurrentGeometry, mix: Mix) -> None:
    assert peak_bytes(recurrent, mix) <= bound_bytes(recurrent, mix)


@pytest.mark.parametrize("mix", WORST)
@pytest.mark.parametrize(
    "recurrent", GEOMETRIES[1:], ids=lambda g: f"{g.key_heads}-{g.value_heads}x{g.key_dim}-{g.value_dim}"
)
def test_the_worst_mix_takes_what_was_planned(recurrent: RecurrentGeometry, mix: str) -> None:
    assert bound_bytes(recurrent, MIXES[mix]) <= LOOSEST * peak_bytes(recurrent, MIXES[mix])


@pytest.mark.parametrize(
    "recurrent", GEOMETRIES, ids=lambda g: f"{g.key_heads}-{g.value_heads}x{g.key_dim}-{g.value_dim}"
)
def test_captured_steps_keep_no_more_alive_than_was_planned_for_their_pool(recurrent: RecurrentGeometry) -> None:
    device, limits = DeviceProfile.named("h200"), Limits(16, 64, 256, 16)
    capacity = RuntimeCapacity.of(
        model_of(recurrent),
        limits,
        device,
        dtype=DTYPE,
        tile_of=lambda _: TileShape(1, 1),
        graph_buckets=(1, 4, 16),
        fused_recurrence=True,
    )
    assert capacity.prompt_buckets == (16,)
    left_bytes = sum(capacity.graph_buckets) * capacity.geometry.vocab_size * WIDTH
    left_bytes += sum(capacity.prompt_buckets) * capacity.geometry.hidden_size * WIDTH
    planned_bytes = graph_pool_bytes(capacity, 0) - GRAPH_POOL_SLACK_BYTES - left_bytes
    decode, prompt = peak_bytes(recurrent, Mix((1,) * 16, 16)), peak_bytes(recurrent, Mix((16,), 0))
    assert decode + prompt <= planned_bytes
