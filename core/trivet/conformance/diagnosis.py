"""Where a wrong model goes wrong: found by leaving tensors out of it and of the oracle alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trivet.conformance.oracle import PROBE_TOKENS, OracleSequence, tensor_groups

if TYPE_CHECKING:
    from trivet.conformance.bench import Bench
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


def diagnose(bench: Bench, tiny: TinyModel, sequence: OracleSequence, said: torch.Tensor, bound: float) -> str:
    """What is known of the cause of a difference.

    Args:
        said: log-probabilities ``[tokens - 1, vocabulary]`` of the runtime, for a whole sequence in one step.
    """
    wrong = ((said - sequence.logprobs[:-1]).abs().amax(-1).nan_to_num(torch.inf) > bound).nonzero().flatten().tolist()
    if not wrong:
        return "one step over the whole prompt is right; what differs is how the tokens were divided over steps"
    known = (
        f"positions {wrong[0]} to {wrong[-1]} differ ({len(wrong)} of {len(said)}); {TOGETHER if wrong[0] else ALONE}"
    )
    healed, sick = _without_each_group(bench, tiny, sequence, bound)
    if healed:
        known += f"; it is right without {', '.join(_short(healed))}, so the fault lies where these are used"
        if sick:
            known += f"; it stays wrong without {', '.join(_short(sick))}"
        return _hint({_leaf(group) for group in healed}, {_leaf(group) for group in sick}, wrong[0]) + known
    if sick:
        known += (
            "; it stays wrong whichever tensors of the layers are left out, so the fault lies in several places or "
            "outside the layers: norms of the residual stream, the final norm, the embedding or the output projection"
        )
    return known


def _short(groups: list[str]) -> list[str]:
    """Groups without what all of them begin and end with."""
    return [group.rpartition(".*.")[2].removesuffix(".weight") for group in groups]


def _leaf(group: str) -> str:
    return group.removesuffix(".weight").rpartition(".")[2]


def _hint(healed: set[str], sick: set[str], first_wrong: int) -> str:
    """What the tensors say to those who know them by the names that most checkpoints use."""
    if {"gate_proj", "up_proj", "down_proj"} <= healed and "o_proj" in sick:
        return "the MLP, its activation, which half of it is the gate, or the norm before it (zero-centred or not): "
    if "o_proj" in healed and "k_proj" in sick:
        return (
            "not the scores, but the values, the output projection, or an output gate that shares q_proj with the "
            "queries (head by head, or in halves): "
        )
    if {"o_proj", "k_proj", "q_proj"} <= healed and first_wrong:
        return "the scores, by the norms of query and key heads, rope, their scale or the mask: "
    return ""


def _without_each_group(
    bench: Bench, tiny: TinyModel, sequence: OracleSequence, bound: float
) -> tuple[list[str], list[str]]:
    """The groups of tensors without which the model is right, and those without which it is still wrong."""
    healed: list[str] = []
    sick: list[str] = []
    probe = list(sequence.tokens[:PROBE_TOKENS])
    with bench.serve(tiny) as served:
        weights = served.engine.owned["weights"]
        if float((served.score(probe) - sequence.logprobs[: PROBE_TOKENS - 1]).abs().max()) <= bound:
            return [], []  # too short to show it
        for group, names in tensor_groups(tiny.tensors).items():
            held = []
            for spec in tiny.weight_map.parameters:
                for part, first in spec.placed():
                    if part.name in names:
                        rows = weights[spec.name].view(spec.shape)[first : first + spec.part_rows(part)]
                        held.append((rows, rows.clone()))
                        rows.zero_()
            try:
                apart = (served.score(probe) - bench.oracle.without(tiny, group)[:-1]).abs().max()
            except Exception:
                apart = torch.tensor(torch.inf)
            (healed if float(apart) <= bound else sick).append(group)
            for rows, before in held:
                rows.copy_(before)
    return healed, sick
