"""The fused Gated DeltaNet kernels are right: against float64, by slot, and across calls.

The tests also run interpreted, on a machine without a device: ``TRITON_INTERPRET=1``, ``--noconftest``.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve
from tests.support.delta import DEVICE, PUBLISHED, DeltaLayer, apart, build_kernels
from tests.support.room import room_on_device

from trivet.caches.state import StateCut
from trivet.capacity.fused import MOST_FUSED_TAPS
from trivet.geometry import RecurrentGeometry
from trivet.ops import PackedRows, causal_conv_prefill, decay_and_beta, gated_rms_norm
from trivet.ops.gated_delta import UNIT_LENGTH_EPS

if TYPE_CHECKING:
    from trivet.ops.fused.delta_inputs import DeltaInputs

ON_DEVICE = DEVICE == "cuda"
SMALL = RecurrentGeometry(key_heads=2, value_heads=4, key_dim=32, value_dim=64, conv_kernel=3)
ODD = RecurrentGeometry(key_heads=1, value_heads=3, key_dim=20, value_dim=24, conv_kernel=2)
EVEN = RecurrentGeometry(key_heads=2, value_heads=2, key_dim=64, value_dim=32, conv_kernel=4)
ALIKE = RecurrentGeometry(key_heads=1, value_heads=3, key_dim=20, value_dim=20, conv_kernel=4)
LONG_TAILED = RecurrentGeometry(key_heads=1, value_heads=1, key_dim=16, value_dim=16, conv_kernel=MOST_FUSED_TAPS)
DECODED = [*([PUBLISHED] if ON_DEVICE else []), SMALL, ODD, EVEN, ALIKE, LONG_TAILED]
UNEVEN = RecurrentGeometry(key_heads=1, value_heads=2, key_dim=24, value_dim=40, conv_kernel=4)
WIDE = RecurrentGeometry(key_heads=1, value_heads=1, key_dim=128, value_dim=160, conv_kernel=2)
NARROW = RecurrentGeometry(key_heads=2, value_heads=2, key_dim=32, value_dim=16, conv_kernel=4)
CHUNKED = [PUBLISHED, SMALL] if ON_DEVICE else [SMALL]
CUT_PLACES = [1, 2, 63, 64, 65, 128]
BATCHES = (1, 3, 16, 64) if ON_DEVICE else (1, 3)
TOGETHER = (1, 2, 16, 64) if ON_DEVICE else (1, 2, 3)
BLOCKS = [(8, 1), (32, 2), (128, 8)]
"""Columns and warps by which no state is served."""
OTHER_SCAN = (32, 4, 2)
"""Columns, warps and stages of a scan that does not serve."""
FAR_ELEMENTS = 2**31 if ON_DEVICE else 2**16
"""Of a pool's states, before the slots that are used: on a device more than 32-bit offsets reach."""
LENGTHS = [[1], [63], [64], [65], [128], [1, 65, 2, 64, 130, 63, 1], *([[8192], [8192, 5, 1]] if ON_DEVICE else [])]
SERVED_DTYPE = torch.bfloat16 if ON_DEVICE else torch.float16
"""The interpreter cuts bfloat16 off instead of rounding it, and multiplies matrices of it wrongly."""
FURTHEST = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of outputs and states, as `apart` measures it: what rounding of inputs at unit length and of products explains."""

BUILT = [*((each, torch.bfloat16) for each in (PUBLISHED, SMALL, UNEVEN, WIDE, NARROW)), (SMALL, torch.float16)]


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    """Compile the kernels of all geometries side by side, where that takes time."""
    if ON_DEVICE:
        with ProcessPoolExecutor(len(BUILT), mp_context=multiprocessing.get_context("spawn")) as compilers:
            list(compilers.map(build_kernels, *zip(*BUILT, strict=True)))
    yield


@pytest.fixture
def room() -> Iterator[None]:
    """Gigabytes of the device's memory."""
    with room_on_device():
        yield


@pytest.fixture
def interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops of kernels that are interpreted take scalars for their bounds."""
    if not ON_DEVICE:
        from tests.support.interpreter import serve_as_loop_bounds

        serve_as_loop_bounds(monkeypatch)


pytestmark = pytest.mark.usefixtures("interpretable")


@pytest.mark.parametrize("dtype", list(FURTHEST), ids=str)
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("recurrent", DECODED, ids=lambda g: f"{g.key_heads}-{g.value_heads}x{g.key_dim}-{g.value_dim}")
def test_decode_steps_advance_the_rows_slots_and_no_other(
    recurrent: RecurrentGeometry, rows: int, dtype: torch.dtype
) -> None:
    layer = DeltaLayer.drawn(recurrent, rows, dtype, seed=rows)
    before, slots, steps = layer.copied(), layer.some_slots(rows), 5
    inputs = [layer.projected(rows) for _ in range(steps)]
    out = torch.stack([layer.decode(projected, slots) for projected in inputs], 1)
    expected, states, tails = before.expected(torch.stack(inputs, 1).flatten(0, 1), slots, [steps] * rows)
    assert apart(out.flatten(0, 1), expected) <= FURTHEST[dtype]
    assert apart(layer.states[slots], states) <= FURTHEST[dtype]
    assert torch.equal(layer.tails[slots].double(), tails)
    others = [slot for slot in range(layer.padding_slot + 1) if slot not in slots.tolist()]
    assert torch.equal(layer.states[others], before.states[others])
    assert torch.equal(layer.tails[others], before.tails[others])


def test_a_decode_row_gives_the_same_bits_alone_and_among_any_others() -> None:
    most = BATCHES[-1]
    layer = DeltaLayer.drawn(CHUNKED[0], most, SERVED_DTYPE, seed=5)
    before, slots, projected = layer.copied(), layer.some_slots(most), layer.projected(most)
    out = layer.decode(projected, slots)
    for rows in TOGETHER:
        for first in (0, most - rows):
            fewer, some = before.copied(), slice(first, first + rows)
            assert torch.equal(fewer.decode(projected[some], slots[some]), out[some])
            assert torch.equal(fewer.states[slots[some]], layer.states[slots[some]])
            assert torch.equal(fewer.tails[slots[some]], layer.tails[slots[some]])


@pytest.mark.parametrize(("columns", "warps"), BLOCKS)
@pytest.mark.parametrize("recurrent", DECODED, ids=lambda g: f"{g.key_heads}-{g.value_heads}x{g.key_dim}-{g.value_dim}")
def test_a_state_divided_otherwise_agrees_up_to_rounding(
    recurrent: RecurrentGeometry, columns: int, warps: int
) -> None:
    from trivet.ops.fused.delta_decode import StateBlocks

    layer = DeltaLayer.drawn(recurrent, 3, SERVED_DTYPE, seed=9)
    other, slots, projected = layer.copied(), layer.some_slots(3), layer.projected(3)
    served = layer.decode(projected, slots)
    found = other.decode(projected, slots, blocks=StateBlocks(columns, warps))
    assert apart(found, served.double()) <= FURTHEST[SERVED_DTYPE] / 4
    assert apart(other.states, layer.states.double()) <= 1e-3
    assert torch.equal(other.tails, layer.tails)


@pytest.mark.parametrize("rows", [1, BATCHES[1]])
def test_padding_rows_change_nothing_and_give_zeros(rows: int) -> None:
    layer = DeltaLayer.drawn(CHUNKED[0], rows, SERVED_DTYPE, seed=6)
    layer.states[layer.padding_slot] = torch.nan
    alone, slots, projected = layer.copied(), layer.some_slots(rows), layer.projected(rows + 5)
    projected[rows:] = torch.nan
    padded = torch.cat((slots, torch.full((5,), layer.padding_slot, device=DEVICE)))
    out = layer.decode(projected, padded)
    assert torch.equal(out[:rows], alone.decode(projected[:rows], slots))
    assert not out[rows:].any()
    assert torch.equal(layer.states[:-1], alone.states[:-1]) and torch.equal(layer.tails, alone.tails)


@pytest.mark.parametrize("dtype", list(FURTHEST), ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("recurrent", CHUNKED, ids=lambda g: f"{g.key_heads}-{g.value_heads}x{g.key_dim}-{g.value_dim}")
def test_chunks_carry_states_and_tails_of_their_slots_across_calls(
    recurrent: RecurrentGeometry, lengths: list[int], dtype: torch.dtype
) -> None:
    if dtype is torch.bfloat16 and not ON_DEVICE:
        pytest.skip("the interpreter multiplies matrices of bfloat16 wrongly")
    if recurrent is PUBLISHED and dtype is torch.float16:
        pytest.skip("small heads show float16")
    layer = DeltaLayer.drawn(recurrent, len(lengths), dtype, seed=sum(lengths))
    before, slots, calls = layer.copied(), layer.some_slots(len(lengths)), 2
    parts = [[layer.projected(length) for length in lengths] for _ in range(calls)]
    rows = PackedRows(lengths, DEVICE)
    outs = [layer.chunks(torch.cat(part), slots, rows.table(0)).split(lengths) for part in parts]
    whole = torch.cat([part[row] for row in range(len(lengths)) for part in parts])
    expected, states, tails = before.expected(whole, slots, [calls * length for length in lengths])
    found = torch.cat([out[row] for row in range(len(lengths)) for out in outs])
    assert apart(found, expected) <= FURTHEST[dtype]
    for row, slot in enumerate(slots.tolist()):
        assert apart(layer.states[slot], states[row]) <= FURTHEST[dtype]
    assert torch.equal(layer.tails[slots].double(), tails)
    others = [slot for slot in range(layer.padding_slot + 1) if slot not in slots.tolist()]
    assert torch.equal(layer.states[others], before.states[others])


def test_chunks_give_the_same_bits_again_and_whatever_the_order_of_rows() -> None:
    lengths = [65, 3, 130]
    layer = DeltaLayer.drawn(CHUNKED[0], len(lengths), SERVED_DTYPE, seed=7)
    again, turned, slots = layer.copied(), layer.copied(), layer.some_slots(len(lengths))
    parts = [layer.projected(length) for length in lengths]
    out = layer.chunks(torch.cat(parts), slots, PackedRows(lengths, DEVICE).table(0)).split(lengths)
    # One row of a step with a decode row before it: the table counts from the first row that is asked for.
    table = PackedRows([1, *lengths], DEVICE).table(1)
    assert torch.equal(again.chunks(torch.cat(parts), slots, table), torch.cat(out))
    rows = PackedRows(lengths[::-1], DEVICE)
    other = turned.chunks(torch.cat(parts[::-1]), slots.flip(0), rows.table(0)).split(lengths[::-1])
    assert all(torch.equal(a, b) for a, b in zip(out, other[::-1], strict=True))
    assert torch.equal(layer.states, again.states) and torch.equal(layer.states, turned.states)


@pytest.mark.parametrize("recurrent", [*CHUNKED, UNEVEN, WIDE, NARROW], ids=lambda g: f"{g.key_dim}-{g.value_dim}")
def test_heads_of_any_width_carry_states_over_chunks(recurrent: RecurrentGeometry) -> None:
    check_cuts(recurrent, [70, 3, 66], [StateCut(0, 68, 1), StateCut(2, 1, 0)])


@pytest.mark.parametrize("recurrent", [UNEVEN, NARROW], ids=lambda g: f"{g.key_dim}-{g.value_dim}")
def test_chunks_of_narrow_heads_touch_no_memory_but_their_own(recurrent: RecurrentGeometry) -> None:
    # Kernels of too narrow tiles faulted in some of many launches.
    layer = DeltaLayer.drawn(recurrent, 2, SERVED_DTYPE, seed=15)
    projected, slots, rows = layer.projected(70), layer.some_slots(2), PackedRows((3, 67), DEVICE)
    first = layer.copied().chunks(projected, slots, rows.table(0))
    for _ in range(400 if ON_DEVICE else 2):
        assert torch.equal(layer.copied().chunks(projected, slots, rows.table(0)), first)


def test_the_longest_tail_that_kernels_take_is_carried() -> None:
    check_cuts(LONG_TAILED, [150, 5], [StateCut(0, 70, 0), StateCut(1, 2, 1)])
    check_cuts(LONG_TAILED, [7, 130], [])


@pytest.mark.parametrize("tokens", CUT_PLACES)
@pytest.mark.parametrize("after", [1, 66])
def test_a_cut_keeps_what_a_call_that_ends_there_leaves(tokens: int, after: int) -> None:
    check_cuts(CHUNKED[0], [tokens + after], [StateCut(0, tokens, 1)])


@pytest.mark.parametrize(
    ("lengths", "cuts"),
    [
        ([5, 131, 1, 70], [StateCut(3, 2, 0), StateCut(1, 1, 2), StateCut(1, 3, 1)]),
        ([130, 2, 67], [StateCut(0, 64, 3), StateCut(0, 128, 0), StateCut(1, 1, 1), StateCut(2, 66, 2)]),
    ],
    ids=["short segments", "whole chunks"],
)
def test_several_cuts_keep_what_calls_that_end_there_leave(lengths: list[int], cuts: list[StateCut]) -> None:
    check_cuts(CHUNKED[0], lengths, cuts)


def check_cuts(recurrent: RecurrentGeometry, lengths: list[int], cuts: list[StateCut]) -> None:
    """A call with cuts against float64, and bit for bit against a call for each piece of a row between them.

    What a piece leaves, and the next one goes on from, is what the snapshot keeps.
    """
    layer = DeltaLayer.drawn(recurrent, len(lengths), SERVED_DTYPE, seed=sum(lengths))
    before, pieces, slots = layer.copied(), layer.copied(), layer.some_slots(len(lengths))
    parts = [layer.projected(length) for length in lengths]
    kept = layer.snapshots(len(cuts) + 1)
    out = layer.chunks(torch.cat(parts), slots, PackedRows(lengths, DEVICE, cuts=cuts).table(0), kept).split(lengths)

    expected, states, tails = before.expected(torch.cat(parts), slots, lengths)
    assert apart(torch.cat(out), expected) <= FURTHEST[SERVED_DTYPE]
    assert apart(layer.states[slots], states) <= FURTHEST[SERVED_DTYPE]
    assert torch.equal(layer.tails[slots].double(), tails)
    for row, part in enumerate(parts):
        slot, begin = slots[row : row + 1], 0
        inside = sorted((cut for cut in cuts if cut.row == row), key=lambda cut: cut.tokens)
        for cut in [*inside, None]:
            end = lengths[row] if cut is None else cut.tokens
            piece = pieces.chunks(part[begin:end], slot, PackedRows([end - begin], DEVICE).table(0))
            assert torch.equal(piece, out[row][begin:end])
            found, at = ((layer.states, layer.tails), slot[0]) if cut is None else (kept, cut.snapshot)
            assert torch.equal(found[0][at], pieces.states[slot[0]])
            assert torch.equal(found[1][at], pieces.tails[slot[0]])
            begin = end
    unused = sorted(set(range(len(cuts) + 1)) - {cut.snapshot for cut in cuts})
    assert all(kind[unused].isnan().all() for kind in kept)


def test_outputs_are_the_same_up_to_rounding_however_chunks_are_scanned() -> None:
    from trivet.ops.fused.delta_chunks import chunked_delta_rule
    from trivet.ops.fused.delta_inputs import delta_inputs
    from trivet.ops.fused.delta_scan import ScanConfig

    lengths = [130, 3, 66]
    layer = DeltaLayer.drawn(CHUNKED[0], len(lengths), SERVED_DTYPE, seed=10)
    other, slots, projected = layer.copied(), layer.some_slots(len(lengths)), layer.projected(sum(lengths))
    kept, other_kept = layer.snapshots(1), layer.snapshots(1)
    table = PackedRows(lengths, DEVICE, cuts=[StateCut(0, 65, 0)]).table(0)
    parameters = (layer.recurrent, layer.conv_weight, layer.a_log, layer.dt_bias, layer.tails, slots, table)
    made = delta_inputs(projected, *parameters, kept[1])
    out = chunked_delta_rule(made, layer.states, slots, table, kept[0])
    found = chunked_delta_rule(made, other.states, slots, table, other_kept[0], ScanConfig(*OTHER_SCAN))
    assert apart(found, out.double()) <= FURTHEST[SERVED_DTYPE] / 4
    assert apart(other.states, layer.states.double()) <= 1e-3
    assert apart(other_kept[0], kept[0].double()) <= 1e-3


def test_devices_of_little_shared_memory_give_the_same_bits_by_fewer_stages() -> None:
    from trivet.ops.fused.delta_scan import FASTEST, config_within

    assert config_within(227 * 2**10) == FASTEST
    assert config_within(99 * 2**10) == evolve(FASTEST, stages=FASTEST.stages - 1)


def hardest(inputs: DeltaInputs) -> DeltaInputs:
    """Every token writes over what the one before it wrote: equal keys, full strength, and nothing is forgotten."""
    key = inputs.key[:1].expand_as(inputs.key).contiguous()
    return evolve(inputs, key=key, decay=torch.zeros_like(inputs.decay), beta=torch.ones_like(inputs.beta))


@pytest.mark.parametrize("recurrent", [*CHUNKED, UNEVEN, WIDE], ids=lambda g: f"{g.key_dim}-{g.value_dim}")
@pytest.mark.parametrize("drawn", ["inputs", "hardest"])
def test_each_chunk_is_solved_as_float64_solves_it(recurrent: RecurrentGeometry, drawn: str) -> None:
    from trivet.ops.fused.delta_inputs import delta_inputs
    from trivet.ops.fused.delta_systems import delta_systems, delta_writes

    lengths = [130, 64, 3]
    layer = DeltaLayer.drawn(recurrent, len(lengths), SERVED_DTYPE, seed=14)
    slots, table = layer.some_slots(len(lengths)), PackedRows(lengths, DEVICE).table(0)
    parameters = (recurrent, layer.conv_weight, layer.a_log, layer.dt_bias, layer.tails, slots, table)
    made = delta_inputs(layer.projected(sum(lengths)), *parameters)
    made = hardest(made) if drawn == "hardest" else made
    weights, inverses = delta_systems(made.query, made.key, made.decay, made.beta, table)
    readers, written = delta_writes(made.key, made.value, made.decay, made.beta, inverses, table)
    group, rounding = recurrent.value_heads // recurrent.key_heads, FURTHEST[SERVED_DTYPE]
    chunks = [min(64, length - begin) for length in lengths for begin in range(0, length, 64)]
    parts = [part.double().split(chunks) for part in (made.query, made.key, made.value, made.decay, made.beta)]
    found = (part.double().split(chunks) for part in (weights, readers, written))
    for query, key, value, decay, beta, weight, reader, write in zip(*parts, *found, strict=True):
        # heads first
        query, key = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (query, key))
        value, decay, beta = value.transpose(0, 1), decay.T, beta.T
        faded = torch.exp2((decay[:, :, None] - decay[:, None, :]).tril()).tril()
        system = (key @ key.transpose(1, 2) * faded * beta[:, :, None]).tril(-1)
        solve = torch.linalg.inv(torch.eye(len(system[0]), dtype=torch.float64, device=DEVICE) + system)
        expected = query @ key.transpose(1, 2) * recurrent.key_dim**-0.5 * faded
        assert not weight[:, :, len(system[0]) :].any()
        assert apart(weight[:, :, : len(system[0])].transpose(0, 1), expected) <= rounding
        assert apart(reader.transpose(0, 1), solve @ (key * (beta * torch.exp2(decay))[:, :, None])) <= rounding
        assert apart(write.transpose(0, 1), solve @ (value * beta[:, :, None])) <= rounding


def test_a_cut_without_snapshots_is_refused() -> None:
    layer = DeltaLayer.drawn(SMALL, 1, SERVED_DTYPE, seed=4)
    before, table = layer.copied(), PackedRows([3], DEVICE, cuts=[StateCut(0, 1, 0)]).table(0)
    states, tails = layer.snapshots(1)
    for kept in (None, (states.repeat_interleave(2, 1), tails)):
        with pytest.raises(ValueError, match="snapshots"):
            layer.chunks(layer.projected(3), layer.some_slots(1), table, kept)
    assert torch.equal(layer.states, before.states) and torch.equal(layer.tails, before.tails)


def test_a_token_gives_the_same_by_either_kernel_up_to_rounding() -> None:
    layer = DeltaLayer.drawn(CHUNKED[0], 4, SERVED_DTYPE, seed=8)
    other, slots, projected = layer.copied(), layer.some_slots(4), layer.projected(4)
    out = layer.decode(projected, slots)
    chunked = other.chunks(projected, slots, PackedRows([1] * 4, DEVICE).table(0))
    assert apart(chunked, out.double()) <= FURTHEST[SERVED_DTYPE]
    assert torch.equal(layer.tails, other.tails)


def far_away(near: DeltaLayer) -> tuple[DeltaLayer, int]:
    """The same layer over a pool in whose last slots are those of `near`, and the number of the first of these.

    A slot's state and tail lie side by side, so that one pool of memory puts both kinds far away.
    """
    recurrent, dtype, count = near.recurrent, near.tails.dtype, len(near.states)
    state, tail = math.prod(recurrent.state_shape), math.prod(recurrent.tail_shape)
    in_one = torch.float32.itemsize // dtype.itemsize
    apart_by = state + math.ceil(tail / in_one)
    first = math.ceil(FAR_ELEMENTS / apart_by)
    pool = torch.empty((first + count) * apart_by, device=DEVICE)
    states = pool.as_strided((first + count, *recurrent.state_shape), (apart_by, *near.states.stride()[1:]))
    tails = pool.view(dtype).as_strided(
        (first + count, *recurrent.tail_shape), (in_one * apart_by, *near.tails.stride()[1:]), in_one * state
    )
    states[first:], tails[first:] = near.states, near.tails
    return evolve(near, states=states, tails=tails), first


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("kernels", ["decode", "chunks"])
def test_slots_and_snapshots_that_32_bit_offsets_do_not_reach_take_the_bits_of_near_ones(kernels: str) -> None:
    lengths = [130, 3, 66]
    near = DeltaLayer.drawn(SMALL, len(lengths), SERVED_DTYPE, seed=12)
    far, first = far_away(near)
    slots, outs = near.some_slots(len(lengths)), []
    spare = next(slot for slot in range(near.padding_slot) if slot not in slots.tolist())
    if kernels == "decode":
        slots = torch.cat((slots, torch.tensor([near.padding_slot], device=DEVICE)))
        projected = near.projected(len(slots))
        outs = [layer.decode(projected, slots + shift) for layer, shift in ((near, 0), (far, first))]
    else:
        projected = near.projected(sum(lengths))
        for layer, shift in ((near, 0), (far, first)):
            # A slot that no row has is the snapshot.
            rows = PackedRows(lengths, DEVICE, cuts=[StateCut(0, 65, shift + spare)])
            outs.append(layer.chunks(projected, slots + shift, rows.table(0), (layer.states, layer.tails)))
    assert torch.equal(*outs)
    assert torch.equal(far.states[first:], near.states)
    assert torch.equal(far.tails[first:], near.tails)


@pytest.mark.parametrize("recurrent", [*CHUNKED, UNEVEN], ids=lambda g: f"{g.key_dim}-{g.value_dim}")
def test_what_the_chunked_rule_is_given_rounds_where_the_torch_operations_round(recurrent: RecurrentGeometry) -> None:
    from trivet.ops.fused.delta_inputs import delta_inputs

    lengths, near = [67, 2, 130], 2**-6 if SERVED_DTYPE is torch.bfloat16 else 2**-9
    layer = DeltaLayer.drawn(recurrent, len(lengths), SERVED_DTYPE, seed=11)
    projected, slots, rows = layer.projected(sum(lengths)), layer.some_slots(len(lengths)), PackedRows(lengths, DEVICE)
    heads = recurrent.value_heads
    # To where the activation gives nothing, or gives its argument again.
    projected[:, : recurrent.conv_channels] *= torch.logspace(-2, 2, recurrent.conv_channels, device=DEVICE)
    mixed, _, b, a = projected.split((recurrent.conv_channels, recurrent.value_elements, heads, heads), dim=-1)
    mixed, tails = causal_conv_prefill(mixed, layer.conv_weight, layer.tails[slots], rows)
    pairs, value = mixed.split((2 * recurrent.key_elements, recurrent.value_elements), dim=-1)
    pairs = pairs.double().unflatten(1, (2, recurrent.key_heads, recurrent.key_dim))
    pairs = pairs * (pairs.square().sum(-1, keepdim=True) + UNIT_LENGTH_EPS).rsqrt()
    log_decay, beta = decay_and_beta(a, b, layer.a_log, layer.dt_bias)
    found = delta_inputs(
        projected, recurrent, layer.conv_weight, layer.a_log, layer.dt_bias, layer.tails, slots, rows.table(0)
    )
    for part, expected in (
        (found.query, pairs[:, 0]),
        (found.key, pairs[:, 1]),
        (found.value, value.view_as(found.value)),
    ):
        expected = expected.to(part.dtype)
        assert (part == expected).float().mean() > 0.98
        assert torch.allclose(part.float(), expected.float(), rtol=near, atol=1e-6)
    place = torch.cat([torch.arange(length, device=DEVICE) % 64 for length in lengths])
    summed = log_decay.double()
    for token in range(len(place)):
        summed[token] += summed[token - 1] if place[token] else 0.0
    assert torch.allclose(found.decay.double(), summed / math.log(2), rtol=1e-4, atol=1e-5)
    assert torch.allclose(found.beta, beta.float(), rtol=near, atol=1e-6)
    assert torch.equal(layer.tails[slots], tails)


@pytest.mark.parametrize("width", [128, 20])
def test_the_gated_norm_rounds_where_the_torch_operations_round(width: int) -> None:
    from trivet.ops.fused.gated_norm import gated_rms_norm as fused

    generator = torch.Generator().manual_seed(width)
    x = torch.randn(33, 6, width, generator=generator).to(SERVED_DTYPE)
    gate = torch.randn(33, 6 * width + 8, generator=generator).to(SERVED_DTYPE)[:, : 6 * width].unflatten(1, (6, width))
    weight = (1 + torch.randn(width, generator=generator)).to(SERVED_DTYPE)
    expected = gated_rms_norm(x, gate, weight, 1e-6)
    found = fused(x.to(DEVICE), gate.to(DEVICE), weight.to(DEVICE), 1e-6).cpu()
    assert (found == expected).float().mean() > 0.98
    assert torch.allclose(
        found.float(), expected.float(), rtol=2**-6 if SERVED_DTYPE is torch.bfloat16 else 2**-9, atol=0.0
    )
