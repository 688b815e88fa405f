"""Where a wrong model goes wrong: by moving norms by 1, and by leaving tensors out of it and of the oracle alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from trivet.conformance.oracle import PROBE_TOKENS, OracleSequence, tensor_groups

if TYPE_CHECKING:
    from trivet.conformance.bench import Bench
    from trivet.conformance.served import Served
    from trivet.conformance.tiny import TinyModel

ALONE = (
    "the first token, which sees only itself, is wrong already: look at projections and how their rows are split, "
    "norms (weights around 1 or zero-centred, eps, width), gates and activations, the embedding and the output "
    "projection; not at rope or masks"
)
TOGETHER = (
    "the first token is right, so that the residual stream's norms, projections and the MLP are: look at how tokens "
    "see each other: the norms of query and key heads, which entries of a head rope turns and by what angle, the scale "
    "of the scores, the mask, and the decay, convolution and state of recurrent layers"
)
MONOTONE = (
    "the logits are right up to a monotone map, for the order of all tokens is the oracle's at every position: a "
    "softcap or a scale behind the output projection is missing, too much or of another size, or the eps or scale of "
    "the final norm is; not the layers: "
)
MONOTONE_MULTIPLE = 10
"""How many bounds apart log-probabilities must be for their order to say something."""
SHIFTS = {
    1.0: "pass zero_centred=True to {its} RmsNorm, for the checkpoint keeps weights less 1",
    -1.0: "do not pass zero_centred=True to {its} RmsNorm, for the checkpoint keeps whole weights",
}
"""What a weight vector is to be moved by, and what that says."""


def diagnose(bench: Bench, tiny: TinyModel, sequence: OracleSequence, said: torch.Tensor, bound: float) -> str:
    """What is known of the cause of a difference.

    Args:
        said: log-probabilities ``[tokens - 1, vocabulary]`` of the runtime, for a whole sequence in one step.
    """
    wrong = ((said - sequence.logprobs[:-1]).abs().amax(-1).nan_to_num(torch.inf) > bound).nonzero().flatten().tolist()
    if not wrong:
        return "one step over the whole prompt is right; what differs is how the tokens were divided over steps"
    known = f"positions {wrong[0]} to {wrong[-1]} differ ({len(wrong)} of {len(said)})"
    with bench.serve(tiny) as served:
        probe = _Probe(bench, served, tiny, sequence, bound)
        shifted = probe.shifted()
        if shifted:
            return shifted + known
        if _same_order(said, sequence.logprobs[:-1], bound):
            return MONOTONE + known
        healed, sick = probe.without_each_group()
    known += f"; {TOGETHER if wrong[0] else ALONE}"
    if healed:
        known += f"; it is right without {', '.join(_short(healed))}, so the fault lies where these are used"
        # Not the norms: a weight of zero means 1 where they are centred so.
        cleared = [group for group in sick if not probe.is_vector(group)]
        if cleared:
            known += f"; it stays wrong without {', '.join(_short(cleared))}"
        return _hint({_leaf(group) for group in healed}, {_leaf(group) for group in sick}, wrong[0]) + known
    if sick:
        known += (
            "; it stays wrong whichever tensors of the layers are left out, so the fault lies in several places or "
            "outside the layers: norms of the residual stream, the final norm, the embedding or the output projection"
        )
    return known


def _same_order(said: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    """Whether log-probabilities are far apart, and yet no two tokens have changed places anywhere."""
    if not float((said - expected).abs().max()) > MONOTONE_MULTIPLE * bound:
        return False
    return bool((said.gather(-1, expected.argsort(-1)).diff(dim=-1) >= -bound).all())


def _short(groups: list[str]) -> list[str]:
    """Groups without what all of them begin and end with."""
    return [group.rpartition(".*.")[2].removesuffix(".weight") for group in groups]


def _leaf(group: str) -> str:
    return group.removesuffix(".weight").rpartition(".")[2]


def _hint(healed: set[str], sick: set[str], first_wrong: int) -> str:
    """What the tensors say to those who know them by the names that most checkpoints use."""
    if {"gate_proj", "up_proj", "down_proj"} <= healed and "o_proj" in sick:
        return (
            "the MLP, its activation, which half of it is the gate, or a norm before it or behind it (zero-centred or "
            "not): "
        )
    if "o_proj" in healed and "k_proj" in sick:
        return (
            "not the scores, but the values, the output projection, a norm behind it, or an output gate that shares "
            "q_proj with the queries (head by head, or in halves): "
        )
    if {"o_proj", "k_proj", "q_proj"} <= healed and first_wrong:
        return "the scores, by the norms of query and key heads, rope, their scale or the mask: "
    return ""


class _Probe:
    """Scores a few tokens while weights of the served model are changed, and puts them back."""

    def __init__(self, bench: Bench, served: Served, tiny: TinyModel, sequence: OracleSequence, bound: float) -> None:
        self._bench, self._served, self._tiny, self._bound = bench, served, tiny, bound
        self._tokens = list(sequence.tokens[:PROBE_TOKENS])
        self._expected = sequence.logprobs[: PROBE_TOKENS - 1]
        self._groups = tensor_groups(tiny.tensors)
        self._shows = not self._right(self._expected)

    def is_vector(self, group: str) -> bool:
        """Whether the tensors of a group are vectors, as the weights of norms are."""
        return self._tiny.tensors[self._groups[group][0]].dim() == 1

    def shifted(self) -> str:
        """Which norms' weights have to be moved by 1 for the model to be right, and what to do; empty if none."""
        if not self._shows:
            return ""  # too short to show it
        grouped = {name for names in self._groups.values() for name in names}
        vectors = {group: names for group, names in self._groups.items() if self.is_vector(group)}
        vectors |= {n: [n] for n, tensor in self._tiny.tensors.items() if tensor.dim() == 1 and n not in grouped}
        widths = {group: len(self._tiny.tensors[names[0]]) for group, names in vectors.items()}
        alike = [[group for group in vectors if widths[group] == width] for width in sorted(set(widths.values()))]
        for groups in [*combinations(vectors, 1), *combinations(vectors, 2), *alike, list(vectors)]:
            names = {name for group in groups for name in vectors[group]}
            for shift, cure in SHIFTS.items():
                with self._changed(names, partial(torch.Tensor.add_, other=shift)):
                    if self._right(self._expected):
                        how = "added to" if shift > 0 else "taken from"
                        told = cure.format(its="its" if len(groups) == 1 else "their")
                        return f"it is right with 1 {how} {', '.join(_short(list(groups)))}: {told}; "
        return ""

    def without_each_group(self) -> tuple[list[str], list[str]]:
        """The groups of tensors without which the model is right, and those without which it is still wrong."""
        healed: list[str] = []
        sick: list[str] = []
        for group, names in self._groups.items() if self._shows else ():
            with self._changed(names, torch.Tensor.zero_):
                try:
                    right = self._right(self._bench.oracle.without(self._tiny, group)[:-1])
                except Exception:
                    right = False
            (healed if right else sick).append(group)
        return healed, sick

    def _right(self, expected: torch.Tensor) -> bool:
        try:
            return float((self._served.score(self._tokens) - expected).abs().max()) <= self._bound
        except Exception:
            return False

    @contextmanager
    def _changed(self, names: Collection[str], change: Callable[[torch.Tensor], object]) -> Iterator[None]:
        weights = self._served.engine.owned["weights"]
        held = []
        for spec in self._tiny.weight_map.parameters:
            for part, first in spec.placed():
                if part.name in names:
                    rows = weights[spec.name].view(spec.shape)[first : first + spec.part_rows(part)]
                    held.append((rows, rows.clone()))
                    change(rows)
        try:
            yield
        finally:
            for rows, before in held:
                rows.copy_(before)
