"""``trivet bench decode --peer transformers``: the same checkpoint, machine and threads, in interleaved pairs.

Three comparisons, each on prompts drawn anew for every pair: one request; and requests of mixed lengths, against
``generate`` one by one, and against ``generate`` on all of them as one padded batch.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import asdict, frozen

from trivet.bench.figures import table
from trivet.bench.loading import with_limits
from trivet.bench.prompts import Lengths, drawn_prompts
from trivet.bench.stepping import BenchmarkError
from trivet.dtypes import as_torch
from trivet.errors import ConfigError
from trivet.installed import install_extra
from trivet.runtime.locate import locate_checkpoint
from trivet.sampling.params import Sampling

if TYPE_CHECKING:
    import torch

    from trivet.runtime.runtime import Runtime

TIE = {"float32": 2e-3, "bfloat16": 0.125, "float16": 0.02}
"""Logits that are no further apart may change places by rounding alone."""
ONE_BY_ONE, PADDED = "one by one", "padded batch"
SINGLE_TURNS = 10
"""A single request is over soon: in each pair the sides take so many turns, each time with another prompt."""

Report = Callable[[str], None]


@frozen
class PeerSettings:
    """What is compared.

    Attributes:
        model: a checkpoint, or the name of a shipped model.
        pairs: how often each side runs each comparison.
        prompt_tokens, new_tokens: of the single request.
        requests: how many requests of mixed lengths.
        mixed_prompt_tokens, mixed_new_tokens: theirs.
        seed: of the prompts and lengths.
        load: further arguments of `Runtime.load`; limits as a mapping of those that were asked for.
    """

    model: str
    pairs: int
    prompt_tokens: int
    new_tokens: int
    requests: int
    mixed_prompt_tokens: Lengths
    mixed_new_tokens: Lengths
    seed: int
    load: Mapping[str, Any]


@frozen
class Requests:
    """Prompts, and how many tokens each is to be continued by."""

    prompts: list[list[int]]
    new_tokens: list[int]


@frozen
class Run:
    """One side's run of one comparison.

    Attributes:
        side: ``"trivet"``, ``"one by one"`` or ``"padded batch"``.
        tokens: new tokens that were asked for.
        wall_s, cpu_s: time that it took, on the clock and of the process.
    """

    side: str
    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall-clock time."""
        return self.tokens / self.wall_s


def bench_peer(settings: PeerSettings, report: Report) -> dict[str, Any]:
    """Check that both sides give the same tokens, then measure; returns what a record keeps.

    Raises:
        BenchmarkError: they give different tokens where no two logits are close.
        ConfigError: transformers is not installed.
    """
    from trivet.runtime.runtime import Runtime

    context = max(
        settings.prompt_tokens + settings.new_tokens,
        settings.mixed_prompt_tokens.most + settings.mixed_new_tokens.most,
    )
    load = with_limits(settings.load, settings.requests, context)
    rng = np.random.default_rng(settings.seed)
    with Runtime.load(settings.model, autostart=False, **load) as runtime:
        peer = Peer.load(settings.model, runtime)
        vocab_size = runtime._engine.blueprint.geometry.vocab_size

        def single() -> Requests:
            return Requests(drawn_prompts(rng, [settings.prompt_tokens], vocab_size), [settings.new_tokens])

        def mixed() -> Requests:
            lengths = settings.mixed_prompt_tokens.draw(rng, settings.requests)
            new_tokens = settings.mixed_new_tokens.draw(rng, settings.requests)
            return Requests(drawn_prompts(rng, lengths, vocab_size), new_tokens)

        equality = _check_equality(runtime, peer, [single(), mixed()])  # also the warm-up
        report(
            f"{equality['equal']} of {equality['requests']} requests get the same tokens from both sides, "
            f"{equality['ties']} part at two logits within {equality['tie_under']:g}"
        )
        pairs = range(settings.pairs)
        singles = [
            [_run_pair(runtime, peer, single(), turn, (ONE_BY_ONE,)) for turn in range(SINGLE_TURNS)] for _ in pairs
        ]
        mixes = [_run_pair(runtime, peer, mixed(), pair, (ONE_BY_ONE, PADDED)) for pair in pairs]
    comparisons = {
        "one request": _comparison([_together(turns) for turns in singles], ONE_BY_ONE),
        f"{settings.requests} requests, {ONE_BY_ONE}": _comparison(mixes, ONE_BY_ONE),
        f"{settings.requests} requests, {PADDED}": _comparison(mixes, PADDED),
    }
    columns = ("trivet_tokens_per_second", "peer_tokens_per_second", "ratios")
    rows = [
        (name, pair, *figures)
        for name, found in comparisons.items()
        for pair, figures in enumerate(zip(*(found[column] for column in columns), strict=True), start=1)
    ]
    report(table(("comparison", "pair", "trivet tok/s", "transformers tok/s", "ratio"), rows))
    medians = [(name, found["median_ratio"], found["median_cpu_ratio"]) for name, found in comparisons.items()]
    report(table((f"medians of {settings.pairs} pairs", "ratio of tok/s", "ratio of CPU time"), medians))
    return {
        "equality": equality,
        "comparisons": comparisons,
        "runs": {
            "one request": [[[asdict(run) for run in turn] for turn in turns] for turns in singles],
            "mixed requests": [[asdict(run) for run in pair] for pair in mixes],
        },
    }


class Peer:
    """A transformers model on the same device, dtype and threads as the runtime.

    Args:
        model: of transformers.
        device: where it is.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device

    @classmethod
    def load(cls, model: str, runtime: Runtime) -> Peer:
        """The checkpoint that `runtime` serves. Its end tokens are ignored, as they are in the runtime."""
        try:
            transformers: Any = importlib.import_module("transformers")
        except ImportError as error:
            advice = install_extra("gate")
            raise ConfigError(f"--peer transformers: transformers is not installed; {advice}") from error
        transformers.utils.logging.disable_progress_bar()
        dtype = as_torch(runtime._engine.blueprint.capacity.dtype)
        device = runtime._engine.inputs["token_ids"].device
        directory = locate_checkpoint(model)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
        # Not by min_new_tokens, which would keep end tokens from being chosen at all.
        loaded.generation_config.eos_token_id = None
        return cls(loaded, device)

    def one_by_one(self, requests: Requests) -> list[list[int]]:
        """``generate`` for each request, one after the other."""
        import torch

        found = []
        for prompt, new_tokens in zip(requests.prompts, requests.new_tokens, strict=True):
            ids = torch.tensor([prompt], device=self._device)
            found.append(self._generate(ids, torch.ones_like(ids), new_tokens)[0].tolist())
        return found

    def padded_batch(self, requests: Requests) -> list[list[int]]:
        """``generate`` for all requests at once, padded on the left, for as long as the longest one goes on."""
        import torch

        longest = max(map(len, requests.prompts))
        ids = torch.zeros(len(requests.prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(requests.prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        rows = self._generate(ids.to(self._device), mask.to(self._device), max(requests.new_tokens)).tolist()
        return [row[:count] for row, count in zip(rows, requests.new_tokens, strict=True)]

    def gap(self, context: Sequence[int], first: int, second: int) -> float:
        """How far apart the logits of two tokens are behind `context`."""
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([list(context)], device=self._device)).logits[0, -1].float()
        return abs(float(logits[first] - logits[second]))

    def _generate(self, ids: torch.Tensor, mask: torch.Tensor, new_tokens: int) -> torch.Tensor:
        import torch

        with torch.inference_mode():
            whole = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
            )
        new: torch.Tensor = whole[:, ids.shape[1] :]
        return new


def _ours(runtime: Runtime, requests: Requests) -> list[list[int]]:
    samplings = [Sampling(max_new_tokens=count, ignore_eos=True) for count in requests.new_tokens]
    return [list(completion.token_ids) for completion in runtime.generate(requests.prompts, samplings)]


def _check_equality(runtime: Runtime, peer: Peer, drawn: Sequence[Requests]) -> dict[str, Any]:
    """Hold the runtime's greedy tokens against the peer's, request by request."""
    dtype = runtime._engine.blueprint.capacity.dtype
    equal = ties = 0
    for requests in drawn:
        answers = zip(requests.prompts, _ours(runtime, requests), peer.one_by_one(requests), strict=True)
        for prompt, ours, theirs in answers:
            if ours == theirs:
                equal += 1
                continue
            place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            if place is None:
                raise BenchmarkError(f"{len(ours)} tokens against {len(theirs)} of transformers for the same request")
            gap = peer.gap([*prompt, *ours[:place]], ours[place], theirs[place])
            if gap > TIE[dtype]:
                raise BenchmarkError(
                    f"new token {place} of a prompt of {len(prompt)} tokens is {ours[place]}, transformers gives "
                    f"{theirs[place]}, and their logits are {gap:.4f} apart: more than rounding in {dtype} explains"
                )
            ties += 1
    return {"requests": equal + ties, "equal": equal, "ties": ties, "tie_under": TIE[dtype]}


def _run_pair(runtime: Runtime, peer: Peer, requests: Requests, pair: int, peer_sides: Sequence[str]) -> list[Run]:
    """Run every side once over the same requests; which one comes first changes from pair to pair."""
    run_of: dict[str, Callable[[], list[list[int]]]] = {
        "trivet": lambda: _ours(runtime, requests),
        ONE_BY_ONE: lambda: peer.one_by_one(requests),
        PADDED: lambda: peer.padded_batch(requests),
    }
    sides = ("trivet", *peer_sides)
    first = pair % len(sides)
    runs = []
    for side in (*sides[first:], *sides[:first]):
        cpu, wall = time.process_time(), time.perf_counter()
        answers = run_of[side]()
        wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        lengths = [len(answer) for answer in answers]
        if lengths != requests.new_tokens:
            raise BenchmarkError(f"{side}: {lengths} new tokens, expected {requests.new_tokens}")
        runs.append(Run(side, sum(lengths), wall_s, cpu_s))
    return runs


def _together(turns: Sequence[Sequence[Run]]) -> list[Run]:
    """What each side did in all turns."""
    runs = []
    for side in sorted({run.side for run in turns[0]}):
        own = [run for turn in turns for run in turn if run.side == side]
        runs.append(
            Run(side, sum(run.tokens for run in own), sum(run.wall_s for run in own), sum(run.cpu_s for run in own))
        )
    return runs


def _comparison(pairs: Sequence[Sequence[Run]], side: str) -> dict[str, Any]:
    """The runtime against one side of the peer, pair by pair."""
    ours, theirs = ([next(run for run in pair if run.side == name) for pair in pairs] for name in ("trivet", side))
    ratios = [mine.tokens_per_second / other.tokens_per_second for mine, other in zip(ours, theirs, strict=True)]
    cpu_ratios = [other.cpu_s / max(mine.cpu_s, 1e-9) for mine, other in zip(ours, theirs, strict=True)]
    return {
        "trivet_tokens_per_second": [run.tokens_per_second for run in ours],
        "peer_tokens_per_second": [run.tokens_per_second for run in theirs],
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
        "median_cpu_ratio": statistics.median(cpu_ratios),
    }
