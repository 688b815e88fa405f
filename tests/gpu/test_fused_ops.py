"""The fused kernels are right: against float64, and rounded where the torch operations round."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from trivet.ops.activation import silu_and_mul
from trivet.ops.fused.table import DeviceTable, MatmulConfig, MatmulShape
from trivet.ops.norm import query_key_rms_norm, rms_norm
from trivet.ops.rotary import apply_rotary, fill_rotary_table, rotary_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

BY_ROWS = MatmulConfig("rows", 2, 256, 4)
BY_SINGLE_ROWS = MatmulConfig("rows", 1, 128, 2)
TILES = MatmulConfig("tiles", 32, 64, 4, 4, split=4)
WHOLE_TILES = MatmulConfig("tiles", 16, 128, 4, 3)
WEIGHTS_FIRST = MatmulConfig("tiles", 64, 64, 4, 4, split=3, weights_first=True)
TILES_WITH_A_REST = MatmulConfig("tiles", 136, 64, 4, 4, ahead=128)
UNEVEN_TILES = MatmulConfig("tiles", 24, 64, 4, 4, split=2, ahead=128)
UNEVEN_WEIGHTS_FIRST = MatmulConfig("tiles", 72, 64, 4, 3, weights_first=True, ahead=128)


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> Iterator[Callable[..., Tensor]]:
    """Normal numbers that depend on the test, not on the tests before it."""
    generator = torch.Generator().manual_seed(sum(map(ord, request.node.name)))

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)

    yield drawn


def by_kernel(
    config: MatmulConfig, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, accumulate: bool, gated: bool
) -> Tensor:
    from trivet.ops.fused.matmul import launch_matmul, tiles_of

    arrivals = torch.zeros(tiles_of(config, weight), dtype=torch.int32, device=weight.device)
    launch_matmul(config, x, weight, bias, out, arrivals, accumulate=accumulate, gated=gated)
    assert not arrivals.any()
    return out


@pytest.mark.parametrize(
    ("config", "dtype", "epilogue"),
    [
        (BY_ROWS, torch.bfloat16, "residual"),
        (BY_ROWS, torch.bfloat16, "gate"),
        (BY_SINGLE_ROWS, torch.float16, "bias"),
        (TILES, torch.bfloat16, "residual"),
        (TILES, torch.bfloat16, "gate"),
        (WHOLE_TILES, torch.float16, "bias"),
        (WEIGHTS_FIRST, torch.bfloat16, "residual"),
        (WEIGHTS_FIRST, torch.bfloat16, "gate"),
        (TILES_WITH_A_REST, torch.bfloat16, "residual"),
        (TILES_WITH_A_REST, torch.bfloat16, "gate"),
        (UNEVEN_TILES, torch.bfloat16, "residual"),
        (UNEVEN_TILES, torch.bfloat16, "gate"),
        (UNEVEN_WEIGHTS_FIRST, torch.float16, "bias"),
        (UNEVEN_WEIGHTS_FIRST, torch.bfloat16, "gate"),
    ],
    ids=lambda value: value.kernel if isinstance(value, MatmulConfig) else str(value),
)
@pytest.mark.parametrize(("outputs", "inner", "batches"), [(128, 512, (1, 2, 3, 16, 64)), (106, 500, (3, 17))])
def test_products_equal_float64_for_any_rows_and_tails(
    draw: Callable[..., Tensor],
    config: MatmulConfig,
    dtype: torch.dtype,
    epilogue: str,
    outputs: int,
    inner: int,
    batches: tuple[int, ...],
) -> None:
    gated, accumulate = epilogue == "gate", epilogue == "residual"
    weight = draw(outputs, inner, dtype=dtype, scale=inner**-0.5)
    bias = draw(outputs, dtype=dtype) if epilogue == "bias" else None
    for rows in batches:
        if config.kernel == "rows" and rows > 4:
            continue
        # A slice of wider rows, as the layers may pass.
        x = draw(rows, inner + 24, dtype=dtype)[:, :inner]
        before = draw(rows, outputs // 2 if gated else outputs, dtype=dtype)
        results = [
            by_kernel(config, x, weight, bias, before.clone(), accumulate=accumulate, gated=gated) for _ in range(2)
        ]
        assert torch.equal(*results)
        products = x.double() @ weight.double().T
        slack = 1e-5 * (x.double().abs() @ weight.double().abs().T)
        steps = HALF_STEP[dtype]
        if gated:
            gate, up = products.chunk(2, -1)
            products, slack = torch.nn.functional.silu(gate) * up, slack.chunk(2, -1)[0] + 1e-3
            steps *= 5
        elif accumulate:
            products = products + before.double()
        elif bias is not None:
            products = products + bias.double()
        error = (results[0].double() - products).abs()
        assert (error <= steps * products.abs() + slack).all(), (rows, float(error.max()))


@pytest.mark.parametrize("config", [BY_ROWS, TILES, WEIGHTS_FIRST], ids=["rows", "tiles", "weights_first"])
def test_a_row_does_not_depend_on_the_rows_beside_it(draw: Callable[..., Tensor], config: MatmulConfig) -> None:
    weight = draw(256, 1024)
    rows = 3 if config.kernel == "rows" else 16
    one, other = draw(rows, 1024), draw(rows, 1024)
    other[1] = one[1]
    first, second = (
        by_kernel(config, x, weight, None, x.new_empty(rows, 256), accumulate=False, gated=False) for x in (one, other)
    )
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], second[0])


@pytest.mark.skipif(DEVICE == "cpu", reason="what runs at once is of interest")
@pytest.mark.parametrize("weights_first", [False, True])
def test_a_split_product_is_the_same_bits_whoever_arrives_last(
    draw: Callable[..., Tensor], weights_first: bool
) -> None:
    from trivet.ops.fused.matmul import launch_matmul

    config = MatmulConfig("tiles", 64, 128, 4, 3, split=8, weights_first=weights_first)
    weight, x = draw(5120, 17408), draw(16, 17408)
    arrivals = torch.zeros(5120 // 64, dtype=torch.int32, device=DEVICE)
    outs = [launch_matmul(config, x, weight, None, x.new_empty(16, 5120), arrivals) for _ in range(200)]
    assert all(torch.equal(outs[0], out) for out in outs)
    expected = x.double() @ weight.double().T
    slack = 1e-5 * (x.double().abs() @ weight.double().abs().T)
    assert ((outs[0].double() - expected).abs() <= HALF_STEP[torch.bfloat16] * expected.abs() + slack).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="kernels follow each other on a device")
@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (1, MatmulConfig("rows", 2, 1024, 4)),
        (16, MatmulConfig("tiles", 64, 128, 4, 3, split=2, weights_first=True)),
        (16, MatmulConfig("tiles", 136, 64, 4, 3, weights_first=True, ahead=256)),
        (64, MatmulConfig("tiles", 120, 64, 4, 4, split=3, ahead=1024)),
    ],
)
def test_kernels_that_start_while_their_predecessor_drains_give_the_same_bits(
    draw: Callable[..., Tensor], rows: int, config: MatmulConfig
) -> None:
    from trivet.ops.fused.matmul import launch_matmul
    from trivet.ops.fused.norm import rms_norm as fused

    hidden, intermediate = 2048, 8192
    up, down = draw(2 * intermediate, hidden, scale=0.02), draw(hidden, intermediate, scale=0.01)
    scale, start = draw(hidden), draw(rows, hidden)
    arrivals = torch.zeros(2 * intermediate // 64, dtype=torch.int32, device=DEVICE)

    def chain(dependent: bool) -> Tensor:
        stream = start.clone()
        for _ in range(30):
            normed = fused(stream, scale, 1e-6, dependent=dependent)
            wide = normed.new_empty(rows, intermediate)
            launch_matmul(config, normed, up, None, wide, arrivals, gated=True, dependent=dependent)
            launch_matmul(config, wide, down, None, stream, arrivals, accumulate=True, dependent=dependent)
        return stream

    expected, dependent = chain(False), chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(True)
    for _ in range(10):
        graph.replay()
        assert torch.equal(captured, expected)
    assert torch.equal(dependent, expected)
    assert expected.isfinite().all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs FlashInfer")
def test_an_owners_places_are_those_that_it_appends_to() -> None:
    from tests.support.cuda import PAGED_PREFILL, PagedRows, bound_owner, capacity_here, untimed_path

    from trivet.capacity import Limits
    from trivet.ops.fused.heads import norm_rotate_append

    path = untimed_path(PAGED_PREFILL)
    capacity = capacity_here(path, 5, 2, 128, Limits(24, 640, 4096, 16))
    owner = bound_owner(path, capacity)
    for query_lengths, kv_lengths, decodes in (([1, 1, 1], [1, 16, 700], 3), ([1, 97, 300], [33, 2000, 300], 1)):
        rows = PagedRows.drawn(capacity, query_lengths, kv_lengths, decodes, outside=0.0)
        owner.update(rows.batch)
        keys, values = rows.cache_keys.clone(), rows.cache_values.clone()
        owner.append(*rows.new, rows.cache_keys, rows.cache_values)
        still = torch.cat((torch.ones(4096, 64), torch.zeros(4096, 64)), 1).flatten().to(DEVICE)
        projected = torch.cat((rows.query, *rows.new), 1).flatten(1)
        places = owner.token_places(projected)
        query = norm_rotate_append(projected, 10, None, still, 128, places, keys, values)
        assert torch.equal(query, rows.query)
        assert torch.equal(keys, rows.cache_keys)
        assert torch.equal(values, rows.cache_values)


def test_the_table_chooses_by_rows_and_leaves_the_rest_to_the_library(draw: Callable[..., Tensor]) -> None:
    from trivet.ops.fused.matmul import SmallBatchMatmul

    weight = draw(64, 256)
    table = DeviceTable({MatmulShape(64, 256, "bfloat16"): {1: MatmulConfig("rows", 2, 256, 4), 16: TILES}})
    product = SmallBatchMatmul(weight, table)
    assert product
    assert not SmallBatchMatmul(weight, table, gated=True)
    for rows, served in ((1, True), (2, False), (8, False), (9, True), (16, True), (17, False), (100, False)):
        x = draw(rows, 256)
        out = product(x)
        assert (out is not None) == served
        if out is not None:
            torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_norm_equals_float64_and_rounds_where_torch_does(
    draw: Callable[..., Tensor], dtype: torch.dtype, zero_centred: bool
) -> None:
    from trivet.ops.fused.norm import rms_norm as fused

    for rows, width in ((1, 5120), (17, 5120), (3, 130), (64, 128)):
        x = draw(rows, width + 8, dtype=dtype, scale=3.0)[:, :width]
        weight = draw(width, dtype=dtype)
        ours = fused(x, weight, 1e-6, zero_centred)
        wide = x.double()
        scale = weight.double() + (1 if zero_centred else 0)
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale
        torch.testing.assert_close(ours.double(), expected, rtol=3 * HALF_STEP[dtype], atol=1e-6)
        theirs = rms_norm(x.cpu(), weight.cpu(), 1e-6, zero_centred)
        assert (ours.cpu() != theirs).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_activation_rounds_where_torch_does(draw: Callable[..., Tensor], dtype: torch.dtype) -> None:
    from trivet.ops.fused.activation import silu_and_mul as fused

    for rows, width in ((1, 2048), (17, 1100), (3, 2048)):
        gate_up = draw(rows, 2 * width, dtype=dtype, scale=4.0)
        ours = fused(gate_up)
        gate, up = gate_up.double().chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(ours.double(), expected, rtol=4 * HALF_STEP[dtype], atol=1e-4)
        assert (ours.cpu() != silu_and_mul(gate_up.cpu())).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 24, 256), (17, 5, 96), (3, 2, 20)])
def test_output_gate_rounds_where_torch_does(
    draw: Callable[..., Tensor], tokens: int, heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    from trivet.ops.fused.output_gate import output_gate

    attended = draw(tokens, heads, head_dim, dtype=dtype)
    # As in a projection: each head's gate behind its query, and keys and values behind them all.
    projected = draw(tokens, 2 * heads * head_dim + 4 * head_dim, dtype=dtype, scale=4.0)
    gates = projected[:, : 2 * heads * head_dim].unflatten(1, (heads, 2, -1))[:, :, 1]
    before, projection = attended.clone(), projected.clone()
    output_gate(attended, gates)
    assert torch.equal(projected, projection)
    expected = before.double() * torch.sigmoid(gates.double())
    torch.testing.assert_close(attended.double(), expected, rtol=2.5 * HALF_STEP[dtype], atol=1e-6)
    assert (attended.cpu() != before.cpu() * torch.sigmoid(gates.cpu())).float().mean() < 0.01


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim", "rotary_dim", "norms", "gated", "dtype"),
    [
        (40, 8, 128, 128, "plain", False, torch.bfloat16),
        (24, 4, 256, 64, "zero-centred", True, torch.bfloat16),
        (5, 1, 64, 64, None, False, torch.float16),
        (6, 3, 96, 24, "plain", False, torch.float16),
    ],
)
def test_heads_are_normed_rotated_and_put_in_their_pages(
    draw: Callable[..., Tensor],
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    norms: str | None,
    gated: bool,
    dtype: torch.dtype,
) -> None:
    from trivet.ops.fused.heads import norm_rotate_append

    page_size, lengths, counts = 16, [1, 40, 17, 33], [1, 5, 1, 33]
    tokens, pages = sum(counts), [-(-length // page_size) for length in lengths]
    listed = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(1))[: sum(pages)]
    indptr = torch.tensor([0, *pages]).cumsum(0)
    batch_indices = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    positions = torch.cat([torch.arange(length - count, length) for length, count in zip(lengths, counts, strict=True)])
    places = tuple(part.to(torch.int32).to(DEVICE) for part in (batch_indices, positions, indptr, listed))
    table = torch.empty(64 * rotary_dim)
    fill_rotary_table(table, 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim), 1.0)
    query_elements = query_heads * head_dim * (2 if gated else 1)
    projected = draw(tokens, query_elements + 2 * kv_heads * head_dim, dtype=dtype)
    query_weight, key_weight = draw(head_dim, dtype=dtype), draw(head_dim, dtype=dtype)
    cache = draw(2, sum(pages) + 4, page_size, kv_heads, head_dim, dtype=dtype)
    keys, values = cache.clone()
    zero_centred = norms == "zero-centred"
    query = norm_rotate_append(
        projected,
        query_heads,
        None if norms is None else (query_weight, key_weight, 1e-6, zero_centred),
        table.to(DEVICE),
        rotary_dim,
        places,
        keys,
        values,
        gated=gated,
    )

    # One operation after the other, on the CPU.
    host = projected.cpu()
    queries, rest = host[:, :query_elements].unflatten(1, (query_heads, -1)), host[:, query_elements:]
    key, value = rest.view(tokens, 2, kv_heads, head_dim).unbind(1)
    heads = torch.cat((queries[..., :head_dim], key), 1)
    if norms is not None:
        heads = query_key_rms_norm(heads, query_weight.cpu(), key_weight.cpu(), query_heads, 1e-6, zero_centred)
    cos, sin = rotary_rows(table, positions, rotary_dim, dtype)
    heads = apply_rotary(heads, cos, sin)
    page = listed[indptr[batch_indices] + positions // page_size]
    wanted_keys, wanted_values = cache.cpu().clone()
    wanted_keys[page, positions % page_size] = heads[:, query_heads:]
    wanted_values[page, positions % page_size] = value
    assert torch.equal(values.cpu(), wanted_values)
    for ours, theirs in ((query.cpu(), heads[:, :query_heads]), (keys.cpu(), wanted_keys)):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=8 * HALF_STEP[dtype], atol=8 * HALF_STEP[dtype])
        assert (ours != theirs).float().mean() < 0.01

    # And in float64, so that the two are not wrong alike.
    wide = torch.cat((queries[..., :head_dim], key), 1).double()
    if norms is not None:
        weights = torch.cat((query_weight.expand(query_heads, -1), key_weight.expand(kv_heads, -1))).cpu().double()
        wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weights + zero_centred)
    angles = positions.double()[:, None] * 10000.0 ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
    left, right, passing = wide.split((rotary_dim // 2, rotary_dim // 2, head_dim - rotary_dim), -1)
    wide = torch.cat((left * cosines - right * sines, right * cosines + left * sines, passing), -1)
    tolerance = 6 * HALF_STEP[dtype] * wide.abs().amax(-1, keepdim=True)
    assert ((query.cpu().double() - wide[:, :query_heads]).abs() <= tolerance[:, :query_heads]).all()
