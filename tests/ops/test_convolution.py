"""The causal convolution carries its tail exactly, whatever the pieces and whoever the neighbours."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.naive import causal_convolution, convolve
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, causal_conv1d_update

from trivet.ops import PackedRows, causal_conv_decode, causal_conv_prefill

CHANNELS = 6
KERNELS = [1, 2, 3, 4]
lengths_lists = st.lists(st.one_of(st.integers(1, 5), st.integers(6, 40)), min_size=1, max_size=6)


def draw(
    tokens: int, rows: int, kernel: int, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.default_generator if seed is None else torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, CHANNELS, generator=generator),
        torch.randn(CHANNELS, kernel, generator=generator),
        torch.randn(rows, CHANNELS, kernel - 1, generator=generator),
    )


@pytest.mark.parametrize("kernel", KERNELS[1:])
@pytest.mark.parametrize("tokens", [1, 2, 3, 17])
def test_a_fresh_row_is_convolved_as_in_transformers(kernel: int, tokens: int) -> None:
    x, weight, state = draw(tokens, 1, kernel)
    ours, _ = convolve(x, weight, torch.zeros_like(state), [tokens])
    theirs = causal_conv1d_fn(x.t()[None], weight, None, activation="silu")[0].t()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_decode_is_transformers_update(kernel: int) -> None:
    x, weight, state = draw(5, 5, kernel)
    # Theirs keeps one entry more, the oldest, which no output reads.
    theirs_state = torch.cat((torch.full((5, CHANNELS, 1), 7.0), state), dim=-1)
    theirs = causal_conv1d_update(x[..., None], theirs_state, weight, None, activation="silu")[..., 0]
    ours, new_state = causal_conv_decode(x, weight, state)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(new_state, theirs_state[..., 1:])


@given(lengths=lengths_lists, kernel=st.sampled_from(KERNELS), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_packed_rows_follow_the_definition(lengths: list[int], kernel: int, seed: int) -> None:
    x, weight, state = draw(sum(lengths), len(lengths), kernel, seed)
    ours, tails = convolve(x, weight, state, lengths)
    for row, (piece, out) in enumerate(zip(x.split(lengths), ours.split(lengths), strict=True)):
        expected, tail = causal_convolution(piece, weight, state[row])
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(tails[row].double(), tail)


@given(
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    kernel=st.sampled_from(KERNELS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_any_split_of_a_row_gives_the_same(pieces: list[int], kernel: int, seed: int) -> None:
    x, weight, state = draw(sum(pieces), 1, kernel, seed)
    whole, tail = convolve(x, weight, state, [sum(pieces)])
    outs = []
    for piece in x.split(pieces):
        out, state = convolve(piece, weight, state, [len(piece)])
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs), whole, rtol=1e-6, atol=1e-6)
    assert torch.equal(state, tail)


@given(lengths=lengths_lists, kernel=st.sampled_from(KERNELS), seed=st.integers(0, 2**31), data=st.data())
@settings(max_examples=30, deadline=None)
def test_nothing_of_a_poisoned_neighbour_reaches_a_row(
    lengths: list[int], kernel: int, seed: int, data: st.DataObject
) -> None:
    x, weight, state = draw(sum(lengths), len(lengths), kernel, seed)
    kept = data.draw(st.integers(0, len(lengths) - 1))
    alone, alone_tail = convolve(x.split(lengths)[kept], weight, state[kept : kept + 1], [lengths[kept]])
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    x[rows != kept], state[torch.arange(len(lengths)) != kept] = torch.nan, torch.nan
    ours, tails = convolve(x, weight, state, lengths)
    torch.testing.assert_close(ours.split(lengths)[kept], alone[: lengths[kept]], rtol=1e-6, atol=1e-6)
    assert torch.equal(tails[kept], alone_tail[0])


@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 9, 1, 3]])
def test_the_memory_order_of_states_and_weights_changes_nothing(lengths: list[int]) -> None:
    x, weight, state = draw(sum(lengths), len(lengths), 4)
    channels_last = state.transpose(1, 2).contiguous().transpose(1, 2)
    weight_last = weight.t().contiguous().t()
    ours = convolve(x, weight_last, channels_last, lengths)
    assert all(map(torch.equal, ours, convolve(x, weight, state, lengths)))
    assert ours[1].stride(1) == 1  # so that what comes back is quick to go in again


@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 9, 1, 3]])
@pytest.mark.parametrize("kernel", KERNELS)
def test_half_precision_is_summed_in_float32_and_rounded_once(lengths: list[int], kernel: int) -> None:
    x, weight, state = (t.bfloat16() for t in draw(sum(lengths), len(lengths), kernel))
    ours, tails = convolve(x, weight, state, lengths)
    finer, finer_tails = convolve(x.float(), weight.float(), state.float(), lengths)
    assert ours.dtype is tails.dtype is torch.bfloat16
    assert torch.equal(ours, finer.bfloat16())
    assert torch.equal(tails, finer_tails.bfloat16())


@pytest.mark.parametrize("lengths", [[1, 1], [2, 5]])
@pytest.mark.parametrize("kernel", KERNELS)
def test_inputs_are_left_alone(lengths: list[int], kernel: int) -> None:
    inputs = draw(sum(lengths), len(lengths), kernel)
    before = [tensor.clone() for tensor in inputs]
    _, tails = convolve(*inputs, lengths)
    tails.fill_(torch.nan)
    assert all(map(torch.equal, inputs, before))


def test_tokens_that_do_not_fit_the_rows_are_refused() -> None:
    x, weight, state = draw(5, 2, 4)
    with pytest.raises(ValueError, match="5 tokens and 2 tails, expected 6 and 2"):
        causal_conv_prefill(x, weight, state, PackedRows([3, 3]))
