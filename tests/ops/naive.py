"""The recurrences token by token in float64, as their papers state them: slow, and plain enough to be believed."""

import torch
from attrs import evolve, frozen
from torch import Tensor

from trivet.ops import PackedRows, causal_conv_prefill, gated_delta_prefill


def causal_convolution(x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """One row: ``x [tokens, channels]``, ``weight [channels, kernel]``, ``tail [channels, kernel - 1]``."""
    x, weight = x.double(), weight.double()
    kernel = weight.shape[1]
    past = list(tail.double().unbind(1))
    outputs = []
    for token in x:
        past.append(token)
        sums = sum((past[-kernel + tap] * weight[:, tap] for tap in range(kernel)), torch.zeros_like(token))
        outputs.append(sums * torch.sigmoid(sums))
    kept = past[len(past) - (kernel - 1) :]
    return torch.stack(outputs), torch.stack(kept, 1) if kept else tail.double()


@frozen(eq=False)
class DeltaInputs:
    """Inputs of the gated delta rule for packed rows, and the states that the rows start from."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor
    state: Tensor

    @classmethod
    def random(
        cls,
        generator: torch.Generator,
        lengths: list[int],
        heads: tuple[int, int] = (2, 4),
        dims: tuple[int, int] = (8, 8),
        slowest: float = 0.001,
        fastest: float = 2.0,
        dtype: torch.dtype = torch.float32,
    ) -> "DeltaInputs":
        """Random inputs; decay rates per token lie between `slowest` and `fastest`, evenly in their logarithm."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        tokens, (key_heads, value_heads), (key_dim, value_dim) = sum(lengths), heads, dims
        ratio = torch.rand(tokens, value_heads, generator=generator, dtype=torch.float64)
        state_dtype = torch.float64 if dtype is torch.float64 else torch.float32
        return cls(
            query=normal(tokens, key_heads, key_dim).to(dtype),
            key=normal(tokens, key_heads, key_dim).to(dtype),
            value=normal(tokens, value_heads, value_dim).to(dtype),
            log_decay=(-slowest * (fastest / slowest) ** ratio).to(state_dtype),
            beta=torch.sigmoid(2 * normal(tokens, value_heads)).to(dtype),
            state=normal(len(lengths), value_heads, key_dim, value_dim).to(state_dtype),
        )

    def tokens(self, start: int, stop: int) -> "DeltaInputs":
        """The same with a slice of the tokens; the states stay."""
        names = ("query", "key", "value", "log_decay", "beta")
        return evolve(self, **{name: getattr(self, name)[start:stop] for name in names})

    def row(self, index: int, lengths: list[int]) -> "DeltaInputs":
        """One row of packed ones, alone."""
        start = sum(lengths[:index])
        alone = self.tokens(start, start + lengths[index])
        return evolve(alone, state=self.state[index : index + 1])

    def prefill(self, packed: PackedRows) -> tuple[Tensor, Tensor]:
        """Through the function under test."""
        return gated_delta_prefill(self.query, self.key, self.value, self.log_decay, self.beta, self.state, packed)


def gated_delta_rule(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """One row, by the definition: outputs ``[tokens, value_heads, value_dim]`` and the last state."""
    key_heads, key_dim = inputs.key.shape[1:]
    value_heads = inputs.value.shape[1]
    state = inputs.state[0].double().clone()
    outputs = torch.zeros(inputs.value.shape, dtype=torch.float64)
    for token in range(inputs.value.shape[0]):
        for head in range(value_heads):
            key_head = head // (value_heads // key_heads)
            query, key = inputs.query[token, key_head].double(), inputs.key[token, key_head].double()
            query = query / (query @ query + 1e-6).sqrt()
            key = key / (key @ key + 1e-6).sqrt()
            decayed = state[head] * inputs.log_decay[token, head].double().exp()
            error = inputs.value[token, head].double() - key @ decayed
            state[head] = decayed + inputs.beta[token, head].double() * torch.outer(key, error)
            outputs[token, head] = query @ state[head] / key_dim**0.5
    return outputs, state[None]


def convolve(x: Tensor, weight: Tensor, state: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Packed rows through the function under test."""
    return causal_conv_prefill(x, weight, state, PackedRows(lengths))
