"""The gated delta rule: chunks, single steps and any mixture of rows compute the same recurrence."""

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.naive import DeltaInputs, gated_delta_rule
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from trivet.ops import PackedRows, decay_and_beta, gated_delta_decode, gated_delta_prefill

GEOMETRIES = [((2, 2), (8, 8)), ((2, 4), (8, 16)), ((2, 6), (16, 4)), ((1, 3), (4, 4))]
lengths_lists = st.lists(st.one_of(st.integers(1, 3), st.integers(4, 90)), min_size=1, max_size=5)


def seeded(seed: int | None = None) -> torch.Generator:
    return torch.default_generator if seed is None else torch.Generator().manual_seed(seed)


def transformers_says(inputs: DeltaInputs, rule: object) -> tuple[torch.Tensor, torch.Tensor]:
    out, state = rule(  # type: ignore[operator]
        *(x[None] for x in (inputs.query, inputs.key, inputs.value)),
        g=inputs.log_decay[None],
        beta=inputs.beta[None],
        initial_state=inputs.state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], state


@pytest.mark.parametrize(("heads", "dims"), GEOMETRIES)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
def test_prefill_is_transformers(tokens: int, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    inputs = DeltaInputs.random(seeded(), [tokens], heads, dims)
    out, state = inputs.prefill(PackedRows([tokens]))
    for rule in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        expected, expected_state = transformers_says(inputs, rule)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "dims"), GEOMETRIES)
def test_decode_is_transformers_recurrent_step(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    inputs = DeltaInputs.random(seeded(), [1] * 5, heads, dims)
    out, state = gated_delta_decode(inputs.query, inputs.key, inputs.value, inputs.log_decay, inputs.beta, inputs.state)
    for row in range(5):
        alone = inputs.row(row, [1] * 5)
        expected, expected_state = transformers_says(alone, torch_recurrent_gated_delta_rule)
        torch.testing.assert_close(out[row : row + 1], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state[row : row + 1], expected_state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 32, 64])
@pytest.mark.parametrize(("heads", "dims"), GEOMETRIES)
def test_chunks_of_any_length_follow_the_definition(
    heads: tuple[int, int], dims: tuple[int, int], chunk_tokens: int
) -> None:
    inputs = DeltaInputs.random(seeded(), [75], heads, dims, dtype=torch.float64)
    out, state = inputs.prefill(PackedRows([75], chunk_tokens=chunk_tokens))
    expected, expected_state = gated_delta_rule(inputs)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(state, expected_state, rtol=1e-10, atol=1e-11)


@given(lengths=lengths_lists, seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_packed_rows_follow_the_definition(lengths: list[int], seed: int) -> None:
    inputs = DeltaInputs.random(seeded(seed), lengths, dtype=torch.float64)
    out, state = inputs.prefill(PackedRows(lengths))
    for row, part in enumerate(out.split(lengths)):
        expected, expected_state = gated_delta_rule(inputs.row(row, lengths))
        torch.testing.assert_close(part, expected, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(state[row : row + 1], expected_state, rtol=1e-10, atol=1e-11)


@given(
    pieces=st.lists(st.one_of(st.integers(1, 3), st.integers(4, 90)), min_size=2, max_size=7),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=20, deadline=None)
def test_any_split_of_a_row_gives_the_same(pieces: list[int], seed: int) -> None:
    tokens = sum(pieces)
    inputs = DeltaInputs.random(seeded(seed), [tokens], dtype=torch.float64)
    whole, last = inputs.prefill(PackedRows([tokens]))
    state, outs, start = inputs.state, [], 0
    for piece in pieces:
        part = inputs.tokens(start, start + piece)
        out, state = gated_delta_prefill(
            part.query, part.key, part.value, part.log_decay, part.beta, state, PackedRows([piece])
        )
        outs.append(out)
        start += piece
    torch.testing.assert_close(torch.cat(outs), whole, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-11)


@given(lengths=lengths_lists, seed=st.integers(0, 2**31), data=st.data())
@settings(max_examples=20, deadline=None)
def test_nothing_of_a_poisoned_neighbour_reaches_a_row(lengths: list[int], seed: int, data: st.DataObject) -> None:
    inputs = DeltaInputs.random(seeded(seed), lengths)
    kept = data.draw(st.integers(0, len(lengths) - 1))
    alone, alone_state = inputs.row(kept, lengths).prefill(PackedRows([lengths[kept]]))
    others = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) != kept
    for tensor in (inputs.query, inputs.key, inputs.value, inputs.log_decay, inputs.beta):
        tensor[others] = torch.nan
    inputs.state[torch.arange(len(lengths)) != kept] = torch.nan
    out, state = inputs.prefill(PackedRows(lengths))
    torch.testing.assert_close(out.split(lengths)[kept], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state[kept : kept + 1], alone_state, rtol=1e-4, atol=1e-5)


def test_value_heads_of_one_key_head_lie_together() -> None:
    # Tiling instead (value head i on key head i modulo key_heads) is the convention of other models.
    inputs = DeltaInputs.random(seeded(), [20], heads=(2, 4))
    out, _ = inputs.prefill(PackedRows([20]))
    repeated = {name: getattr(inputs, name).repeat_interleave(2, dim=1) for name in ("query", "key")}
    tiled = {name: getattr(inputs, name).repeat(1, 2, 1) for name in ("query", "key")}
    rest = (inputs.value, inputs.log_decay, inputs.beta, inputs.state, PackedRows([20]))
    same, _ = gated_delta_prefill(repeated["query"], repeated["key"], *rest)
    other, _ = gated_delta_prefill(tiled["query"], tiled["key"], *rest)
    torch.testing.assert_close(out, same, rtol=1e-5, atol=1e-6)
    assert (out - other).abs().max() > 1e-2


def test_slow_decay_carries_the_first_state_through_thousands_of_tokens() -> None:
    generator = seeded()
    inputs = DeltaInputs.random(generator, [2000], dims=(16, 8))
    rate = torch.empty(4).uniform_(0.001, 0.005, generator=generator)
    bias = torch.empty(4).uniform_(-1, 0, generator=generator)
    log_decay, _ = decay_and_beta(torch.randn(2000, 4, generator=generator), inputs.beta, rate.log(), bias)
    # New tokens write over what is kept along their keys: at a low rate, something is left of the first state.
    inputs = evolve(inputs, log_decay=log_decay, beta=0.01 * inputs.beta)
    out, state = inputs.prefill(PackedRows([2000]))
    expected, expected_state = gated_delta_rule(inputs)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-3, atol=2e-5)
    _, without = evolve(inputs, state=torch.zeros_like(state)).prefill(PackedRows([2000]))
    assert (state - without).abs().max() > 1e-3


@pytest.mark.parametrize("rate", [5.0, 100.0, 1e4])
def test_strong_decay_neither_overflows_nor_forgets_to_forget(rate: float) -> None:
    inputs = DeltaInputs.random(seeded(), [100, 1, 3], slowest=rate / 2, fastest=rate)
    out, state = inputs.prefill(PackedRows([100, 1, 3]))
    for row, part in enumerate(out.split([100, 1, 3])):
        expected, expected_state = gated_delta_rule(inputs.row(row, [100, 1, 3]))
        torch.testing.assert_close(part.double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state[row : row + 1].double(), expected_state, rtol=1e-4, atol=1e-5)


def test_a_sudden_decay_does_not_blur_the_slow_ones_after_it() -> None:
    inputs = DeltaInputs.random(seeded(), [64], slowest=0.001, fastest=0.05)
    inputs.log_decay[3] = -300.0
    out, state = inputs.prefill(PackedRows([64]))
    expected, expected_state = gated_delta_rule(inputs)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-3, atol=1e-4)


def test_equal_keys_at_full_rate_stay_finite() -> None:
    # The triangular system is then at its worst: every token overwrites what the one before it wrote.
    inputs = DeltaInputs.random(seeded(), [96], slowest=1e-4, fastest=1e-3)
    inputs.key.copy_(inputs.key[:1].clone().expand_as(inputs.key))
    inputs.beta.fill_(1.0)
    out, _ = inputs.prefill(PackedRows([96]))
    expected, _ = gated_delta_rule(inputs)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-4)


def test_vectors_of_no_length_write_and_read_nothing() -> None:
    inputs = DeltaInputs.random(seeded(), [10, 1])
    inputs.key.zero_()
    inputs.query.zero_()
    out, state = inputs.prefill(PackedRows([10, 1]))
    assert torch.equal(out, torch.zeros_like(out))
    decay = torch.stack([part.sum(0).exp() for part in inputs.log_decay.split([10, 1])])
    torch.testing.assert_close(state, inputs.state * decay[..., None, None], rtol=1e-5, atol=1e-6)


def test_decode_writes_the_new_state_where_it_is_told() -> None:
    inputs = DeltaInputs.random(seeded(), [1] * 3)
    step = (inputs.query, inputs.key, inputs.value, inputs.log_decay, inputs.beta)
    before = inputs.state.clone()
    out, new_state = gated_delta_decode(*step, inputs.state)
    assert torch.equal(inputs.state, before)
    elsewhere = torch.full_like(before, torch.nan)
    out_elsewhere, returned = gated_delta_decode(*step, inputs.state, elsewhere)
    assert returned.data_ptr() == elsewhere.data_ptr()
    assert torch.equal(inputs.state, before)
    out_in_place, returned = gated_delta_decode(*step, inputs.state, inputs.state)
    assert returned.data_ptr() == inputs.state.data_ptr()
    assert torch.equal(elsewhere, new_state)
    assert torch.equal(inputs.state, new_state)
    assert torch.equal(out_elsewhere, out)
    assert torch.equal(out_in_place, out)


@pytest.mark.parametrize("lengths", [[1, 1], [40], [3, 40, 1, 40]])
def test_prefill_leaves_its_inputs_alone(lengths: list[int]) -> None:
    inputs = DeltaInputs.random(seeded(), lengths)
    tensors = (inputs.query, inputs.key, inputs.value, inputs.log_decay, inputs.beta, inputs.state)
    before = [tensor.clone() for tensor in tensors]
    out, state = inputs.prefill(PackedRows(lengths))
    out.fill_(torch.nan)
    state.fill_(torch.nan)
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [40], [3, 40, 1]])
def test_half_precision_is_computed_in_float32_and_rounded_once(lengths: list[int], dtype: torch.dtype) -> None:
    inputs = DeltaInputs.random(seeded(), lengths, dtype=dtype)
    out, state = inputs.prefill(PackedRows(lengths))
    finer = evolve(inputs, **{name: getattr(inputs, name).float() for name in ("query", "key", "value", "beta")})
    expected, expected_state = finer.prefill(PackedRows(lengths))
    assert out.dtype is dtype
    assert state.dtype is torch.float32
    assert torch.equal(out, expected.to(dtype))
    assert torch.equal(state, expected_state)


def test_heads_that_are_views_of_one_projection_are_read_as_they_lie() -> None:
    fused = torch.randn(50, 2 * 8 + 2 * 8 + 4 * 8)
    query, key, value = fused.split([16, 16, 32], dim=-1)
    query, key, value = query.unflatten(-1, (2, 8)), key.unflatten(-1, (2, 8)), value.unflatten(-1, (4, 8))
    plain = DeltaInputs.random(seeded(), [40, 1, 9])
    rest = (plain.log_decay, plain.beta, plain.state, PackedRows([40, 1, 9]))
    ours = gated_delta_prefill(query, key, value, *rest)
    expected = gated_delta_prefill(query.contiguous(), key.contiguous(), value.contiguous(), *rest)
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decay_and_beta_are_qwen35s(dtype: torch.dtype) -> None:
    a, b = 4 * torch.randn(50, 6), torch.randn(50, 6)
    a, b, a_log, dt_bias = (t.to(dtype) for t in (a, b, torch.empty(6).uniform_(0.001, 16).log(), torch.randn(6)))
    log_decay, beta = decay_and_beta(a, b, a_log, dt_bias)
    assert log_decay.dtype is torch.float32
    assert beta.dtype is dtype
    expected = -a_log.double().exp() * torch.log1p((a.double() + dt_bias.double()).exp())
    torch.testing.assert_close(log_decay.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        beta, 1 / (1 + (-b.float()).exp()).to(dtype), rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=0
    )
    assert (log_decay <= 0).all()


def test_decay_and_beta_leave_the_parameters_alone() -> None:
    inputs = tuple(torch.randn(*shape) for shape in ((3, 4), (3, 4), (4,), (4,)))
    before = [tensor.clone() for tensor in inputs]
    decay_and_beta(*inputs)
    assert all(map(torch.equal, inputs, before))


def test_shapes_that_do_not_fit_are_refused() -> None:
    inputs = DeltaInputs.random(seeded(), [5, 4])
    with pytest.raises(ValueError, match="9 tokens and 2 states, expected 8 and 2"):
        inputs.prefill(PackedRows([4, 4]))
    three_heads = DeltaInputs.random(seeded(), [5], heads=(3, 4))
    with pytest.raises(ValueError, match="4 value heads over 3 key heads"):
        three_heads.prefill(PackedRows([5]))


@pytest.mark.parametrize("lengths", [[1], [5]])
def test_a_state_of_lower_precision_is_refused(lengths: list[int]) -> None:
    inputs = DeltaInputs.random(seeded(), lengths)
    half = inputs.state.bfloat16()
    with pytest.raises(ValueError, match=r"state is torch.bfloat16, expected torch.float32"):
        gated_delta_prefill(
            inputs.query, inputs.key, inputs.value, inputs.log_decay, inputs.beta, half, PackedRows(lengths)
        )
