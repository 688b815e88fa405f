"""One step of sampling: from logits to the next token of every row, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from trivet.errors import PluginError
from trivet.sampling.batch import Choice, RowGroup, SampleGroups, SamplingBatch
from trivet.sampling.filters import DrawParameters, draw, draw_among_first, draw_nucleus
from trivet.sampling.layout import VALUES_PER_SAMPLE, chunk_rows
from trivet.sampling.logprobs import Logprobs, TokenLogprob, token_logprobs, unpacked
from trivet.sampling.noise import row_keys

if TYPE_CHECKING:
    from torch import Tensor


@frozen
class HostSamples:
    """A step's samples on the host, one entry per row.

    Attributes:
        token_ids: the tokens; meaningless where `bad`.
        bad: whether the row's logits were unusable, which ends its request with an error.
        logprobs: None where the request asked for none.
    """

    token_ids: list[int]
    bad: list[bool]
    logprobs: list[TokenLogprob | None]

    def first(self, rows: int) -> HostSamples:
        """The samples of the first `rows` rows; padding rows may stand behind them."""
        if rows == len(self.token_ids):
            return self
        return HostSamples(self.token_ids[:rows], self.bad[:rows], self.logprobs[:rows])


@frozen(eq=False)
class SampleResult:
    """A step's samples, on the device.

    Attributes:
        token_ids: int64 [rows]; 0 where `bad`.
        bad: bool [rows]: the row's logits hold NaN or +inf, or no finite value.
        logprobs: of the rows that `groups.scored` lists, in its order; None if there are none.
        groups: what the rows were sampled by.
    """

    token_ids: Tensor
    bad: Tensor
    logprobs: Logprobs | None
    groups: SampleGroups

    def packed(self) -> Tensor:
        """Everything in one flat int64 tensor, so that it crosses in one transfer."""
        parts = [self.token_ids, self.bad.to(torch.int64)]
        if self.logprobs is not None:
            parts.append(self.logprobs.packed().flatten())
        return torch.cat(parts)

    def unpacked(self, packed: Tensor) -> HostSamples:
        """What `packed` gave, from a copy of it on the host."""
        rows = len(self.token_ids)
        logprobs: list[TokenLogprob | None] = [None] * rows
        if self.logprobs is not None:
            scored = self.groups.scored
            values = unpacked(packed[VALUES_PER_SAMPLE * rows :].view(len(scored), -1), [count for _, count in scored])
            for (row, _), value in zip(scored, values, strict=True):
                logprobs[row] = value
        token_ids, bad = packed[: VALUES_PER_SAMPLE * rows].view(VALUES_PER_SAMPLE, rows)
        return HostSamples(token_ids.tolist(), bad.to(torch.bool).tolist(), logprobs)

    def to_host(self) -> HostSamples:
        """The samples on the host; waits for the device."""
        return self.unpacked(self.packed().cpu())


def sample(
    batch: SamplingBatch,
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    groups: SampleGroups | None = None,
) -> SampleResult:
    """Choose the next token of every row.

    A row's token depends on its logits, its request's parameters, seed and counts, and its position: not on
    the other rows, their number, their order or what they ask for.

    Args:
        batch: the state; not changed (see `SamplingBatch.accept`).
        logits: [rows, vocabulary] in the model's dtype or float32; kept.
        slots: int64 [rows], on the device.
        positions: int64 [rows], on the device: the place in the sequence that the new token will take.
        groups: of ``batch.groups(slots)``; None works them out, which on CUDA waits for the device.

    Raises:
        PluginError: the logits do not have one column for each token of the vocabulary.
    """
    if logits.dim() != 2 or logits.shape[1] != batch.vocabulary:
        raise PluginError(
            f"logits have shape {list(logits.shape)}: expected [rows, {batch.vocabulary}], "
            "one column for each token of the config's vocabulary"
        )
    if groups is None:
        groups = batch.groups(slots)
    largest, token_ids = logits.max(-1)
    bad = largest.isfinite().logical_not_()
    if groups.special:
        keys = row_keys(batch["seed"][slots], positions.to(torch.int64))
        for group in groups.special:
            for rows in torch.split(group.rows, chunk_rows(batch.vocabulary, batch.device.type)):
                picked = (keys[0][rows], keys[1][rows])
                chosen = _choose(batch, group, logits[rows].float(), slots[rows], picked, token_ids[rows])
                token_ids.index_copy_(0, rows, chosen)
    token_ids.masked_fill_(bad, 0)
    logprobs = None
    if groups.scored_rows is not None:
        most = max(count for _, count in groups.scored)
        rows = groups.scored_rows
        logprobs = token_logprobs(logits, token_ids[rows], most, rows)
    return SampleResult(token_ids, bad, logprobs, groups)


def _choose(
    batch: SamplingBatch, group: RowGroup, logits: Tensor, slots: Tensor, keys: tuple[Tensor, Tensor], largest: Tensor
) -> Tensor:
    """The tokens of a group's rows; `largest` are those of their largest unpenalised logits."""
    if group.penalised:
        logits = batch.penalties.apply(
            logits,
            slots,
            batch["repetition_penalty"][slots],
            batch["presence_penalty"][slots],
            batch["frequency_penalty"][slots],
        )
    if group.choice is Choice.GREEDY:
        return logits.argmax(-1)
    parameters = DrawParameters(
        batch["temperature"][slots], batch["top_k"][slots], batch["top_p"][slots], batch["min_p"][slots], keys
    )
    hashes = batch["token_hashes"]
    if group.choice is Choice.DRAWN:
        return torch.where(parameters.temperature > 0, draw(logits, parameters, hashes), largest)
    if group.choice is Choice.AMONG_FIRST:
        return draw_among_first(logits, parameters, hashes, group.candidates)
    return draw_nucleus(logits, parameters, hashes)
