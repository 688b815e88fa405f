"""What a family's log-probabilities are held against: computed by something else, live or stored."""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from attrs import frozen

from trivet.conformance.failure import NotRun, broken
from trivet.conformance.tiny import TinyModel, draw_tensors, make_tiny, read_config
from trivet.errors import ConfigError
from trivet.plugin.evidence import StoredOracle, TransformersOracle
from trivet.plugin.manager import PluginManager

if TYPE_CHECKING:
    from trivet.plugin.family import ModelFamily

LENGTHS = ((70, 12), (9, 10))
"""Tokens of the prompt, and of the oracle's own greedy continuation, of each sequence."""
PROBE_TOKENS = 8
"""Tokens over which the oracle also says what the model says without some of its tensors."""
MARGIN_NATS = 0.05
"""Greedy continuations are taken only where the best token leads the second by this much."""
PROMPTS_TRIED = 50
SCHEMA = "trivet.oracle/1"
CHECKSUM_TOLERANCE = 1e-4
AGAIN = "store the log-probabilities again, with trivet.conformance.store_logprobs"

Reference = Callable[[Mapping[str, object], Mapping[str, torch.Tensor], Sequence[int]], torch.Tensor]
"""Takes config.json, every tensor by its name on disk (float32) and token ids; gives logits or log-probabilities
``[tokens, vocabulary]`` of the token after each."""


@frozen(eq=False)
class OracleSequence:
    """A sequence and what the oracle says of it.

    Attributes:
        tokens: a drawn prompt and the oracle's greedy continuation.
        prompt_tokens: how many of them are the prompt.
        logprobs: float32 ``[tokens, vocabulary]``, of the token after each.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    logprobs: torch.Tensor


class Oracle(Protocol):
    """Says what a model over tiny weights says."""

    @property
    def source(self) -> str:
        """What computed it."""

    def sequences(self, tiny: TinyModel) -> Sequence[OracleSequence]:
        """Sequences of `tiny` with their log-probabilities; `Broken` if they are of another config or weights."""

    def without(self, tiny: TinyModel, group: str) -> torch.Tensor:
        """Log-probabilities of the first `PROBE_TOKENS` of the first sequence, the tensors of `group` zero."""


def tensor_groups(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Tensors of the layers by their name without the layer's number."""
    groups: dict[str, list[str]] = {}
    for name in tensors:
        group, numbered = re.subn(r"(?<=\.)\d+(?=\.)", "*", name)
        if numbered:
            groups.setdefault(group, []).append(name)
    return groups


def without_group(tensors: Mapping[str, torch.Tensor], group: str) -> dict[str, torch.Tensor]:
    """`tensors` with those of `group` zero."""
    zero = set(tensor_groups(tensors)[group])
    return {name: torch.zeros_like(tensor) if name in zero else tensor for name, tensor in tensors.items()}


def open_oracle(family: ModelFamily, workspace: Path, rng: Callable[[str], np.random.Generator]) -> Oracle:
    """The oracle that `family` declares.

    Args:
        workspace: folder for checkpoints that it needs.
        rng: random numbers for one purpose.

    Raises:
        NotRun: it declares none, or what it needs is not there.
        Broken: what was stored cannot be read.
    """
    declared = family.oracle
    if isinstance(declared, StoredOracle):
        return _Stored(declared.file)
    if isinstance(declared, TransformersOracle):
        return _Transformers(declared.model, family, workspace, rng)
    raise NotRun(
        "the family declares no oracle: give ModelFamily.oracle a StoredOracle or a TransformersOracle, so that its "
        "numbers can be held against something"
    )


def store_logprobs(model_type: str, file: Path | str, reference: Reference, source: str) -> None:
    """Write the log-probabilities that a `StoredOracle` reads.

    Args:
        model_type: finds the family; all its tiny configs are stored, whatever model type they are of.
        file: where to write, within the family's package.
        reference: computes them, by means of its own: never the family's layers.
        source: what `reference` is, for reports, as in ``"transformers 5.24.0 LlamaForCausalLM"``.
    """
    from safetensors.torch import save

    family = PluginManager.discover().family_for(model_type)
    stored: dict[str, torch.Tensor] = {}
    about: dict[str, Any] = {"schema": SCHEMA, "source": source, "configs": {}}
    for name, config in family.tiny_configs.items():
        _, weight_map = read_config(family, config)
        tensors = draw_tensors(weight_map)
        evaluate = _evaluator(reference, config)
        sequences = _draw_sequences(evaluate, tensors, np.random.default_rng(len(name)))
        for index, sequence in enumerate(sequences):
            stored[f"{name}/{index}/tokens"] = torch.tensor(sequence.tokens)
            stored[f"{name}/{index}/logprobs"] = sequence.logprobs.contiguous()
        probe = sequences[0].tokens[:PROBE_TOKENS]
        for group in tensor_groups(tensors):
            stored[f"{name}/without/{group}"] = evaluate(without_group(tensors, group), probe).contiguous()
        about["configs"][name] = {
            "config": _stated(config),
            "prompt_tokens": [sequence.prompt_tokens for sequence in sequences],
            **_fingerprint(tensors),
        }
    Path(file).write_bytes(save(stored, metadata={"trivet": json.dumps(about, sort_keys=True)}))


class _Stored:
    def __init__(self, target: str) -> None:
        from safetensors import SafetensorError, safe_open

        package, _, file = target.partition(":")
        try:
            path = resources.files(package).joinpath(file)
        except ModuleNotFoundError as error:
            raise NotRun(
                f"there is no oracle: the stored one is {target!r}, and {error}: name the package that carries the file"
            ) from error
        with resources.as_file(path) as real:
            if not real.is_file():
                raise NotRun(
                    f"there is no oracle: the stored one, {target!r}, is not in its package: write it with "
                    "trivet.conformance.store_logprobs, and let the distribution carry it"
                )
            try:
                with safe_open(real, framework="pt") as opened:
                    self._tensors: dict[str, torch.Tensor] = {
                        name: opened.get_tensor(name)
                        for name in opened.keys()  # noqa: SIM118
                    }
                    about = json.loads((opened.metadata() or {}).get("trivet", "{}"))
            except (SafetensorError, ValueError) as error:
                broken(
                    observed=f"the stored oracle {target!r} cannot be read: {error}",
                    expected="a safetensors file that store_logprobs wrote",
                    cause=f"the file is damaged, or stands for one that was not downloaded: {AGAIN}",
                )
        if about.get("schema") != SCHEMA:
            broken(
                observed=f"the stored oracle {target!r} has schema {about.get('schema')!r}",
                expected=f"{SCHEMA!r}",
                cause=f"something else than this Trivet's store_logprobs wrote it: {AGAIN}",
            )
        self._about = about
        self._target = target

    @property
    def source(self) -> str:
        return f"{self._target}, computed by {self._about['source']}"

    def sequences(self, tiny: TinyModel) -> Sequence[OracleSequence]:
        about = self._about["configs"].get(tiny.name)
        if about is None:
            raise NotRun(f"{self._target} has no log-probabilities of tiny config {tiny.name!r}: {AGAIN}")
        self._require_same_config(tiny, about)
        self._require_same_weights(tiny, about)
        return [
            OracleSequence(
                tuple(self._tensors[f"{tiny.name}/{index}/tokens"].tolist()),
                prompt_tokens,
                self._tensors[f"{tiny.name}/{index}/logprobs"],
            )
            for index, prompt_tokens in enumerate(about["prompt_tokens"])
        ]

    def without(self, tiny: TinyModel, group: str) -> torch.Tensor:
        return self._tensors[f"{tiny.name}/without/{group}"]

    def _require_same_config(self, tiny: TinyModel, about: Mapping[str, Any]) -> None:
        found, stored = _stated(tiny.config), about.get("config")
        if stored is None:
            broken(
                observed=f"{self._target} does not say which config its log-probabilities of {tiny.name!r} are of",
                expected="the tiny config beside them",
                cause=f"an earlier Trivet wrote the file: {AGAIN}",
            )
        if found != stored:
            changes = [
                f"{key} is {found.get(key, 'absent')}, was {stored.get(key, 'absent')}"
                for key in sorted(found.keys() | stored.keys())
                if found.get(key) != stored.get(key)
            ]
            broken(
                observed=f"tiny config {tiny.name!r} is not the one that its stored log-probabilities are of: "
                f"{', '.join(changes[:6])}",
                expected=f"the config as it was when {self._target} was written",
                cause=f"the tiny config was changed after its log-probabilities were stored: {AGAIN}",
            )

    def _require_same_weights(self, tiny: TinyModel, about: Mapping[str, Any]) -> None:
        found = _fingerprint(tiny.tensors)
        if found["tensors"] != about["tensors"]:
            there = about["tensors"]
            strange = [f"{k} {v}" for k, v in found["tensors"].items() if there.get(k) != v]
            strange += [f"no {k} {v}" for k, v in there.items() if k not in found["tensors"]]
            broken(
                observed=f"tiny config {tiny.name!r} asks for other tensors than its stored log-probabilities are of: "
                f"{', '.join(strange[:6])}",
                expected="the tensors that the reference implementation reads, by name and shape",
                cause="the weight map or the geometry names or sizes a tensor wrongly; if the change is meant, "
                f"{AGAIN}",
            )
        if abs(found["checksum"] - about["checksum"]) > CHECKSUM_TOLERANCE * about["checksum"]:
            broken(
                observed=f"the weights of tiny config {tiny.name!r} sum to {found['checksum']:.6g}",
                expected=f"{about['checksum']:.6g}, as when the log-probabilities were stored",
                cause="the initial draws in the weight map have changed (as by a norm's centre), or this torch draws "
                f"other random numbers: {AGAIN}",
            )


class _Transformers:
    def __init__(
        self, model: str, family: ModelFamily, workspace: Path, rng: Callable[[str], np.random.Generator]
    ) -> None:
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise NotRun(
                f"the oracle is transformers' {model}, and transformers cannot be imported ({error}): pip install "
                "transformers"
            ) from error
        self._class = getattr(transformers, model, None)
        if self._class is None:
            raise NotRun(f"transformers {transformers.__version__} has no class {model!r}: upgrade it")
        self._family = family
        self._workspace = workspace
        self._rng = rng
        self._sequences: dict[str, list[OracleSequence]] = {}
        self.source = f"transformers {transformers.__version__} {model}"

    def sequences(self, tiny: TinyModel) -> Sequence[OracleSequence]:
        if tiny.name not in self._sequences:
            rng = self._rng(f"oracle {tiny.name}")
            model = self._load(tiny.directory)
            evaluate = lambda _, tokens: _logprobs(model, tokens)  # noqa: E731
            self._sequences[tiny.name] = _draw_sequences(evaluate, tiny.tensors, rng)
        return self._sequences[tiny.name]

    def without(self, tiny: TinyModel, group: str) -> torch.Tensor:
        directory = self._workspace / "oracle" / tiny.name
        make_tiny(self._family, tiny.name, tiny.config, directory, without_group(tiny.tensors, group))
        return _logprobs(self._load(directory), self.sequences(tiny)[0].tokens[:PROBE_TOKENS])

    def _load(self, directory: Path) -> Any:
        assert self._class is not None
        return self._class.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()


@torch.inference_mode()
def _logprobs(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), dim=-1).float()


def _evaluator(
    reference: Reference, config: Mapping[str, object]
) -> Callable[[Mapping[str, torch.Tensor], Sequence[int]], torch.Tensor]:
    def evaluate(tensors: Mapping[str, torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
        logits = reference(copy.deepcopy(config), tensors, tokens)  # some write into the config that they are given
        if logits.dim() != 2 or logits.shape[0] != len(tokens):
            raise ConfigError(
                f"the reference gave a tensor of shape {list(logits.shape)} for {len(tokens)} tokens, expected "
                f"[{len(tokens)}, vocabulary]"
            )
        return torch.log_softmax(logits.detach().double(), dim=-1).float()

    return evaluate


def _draw_sequences(
    evaluate: Callable[[Mapping[str, torch.Tensor], Sequence[int]], torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    rng: np.random.Generator,
) -> list[OracleSequence]:
    vocabulary = evaluate(tensors, [0]).shape[-1]
    return [_continue(evaluate, tensors, rng, vocabulary, *lengths) for lengths in LENGTHS]


def _continue(
    evaluate: Callable[[Mapping[str, torch.Tensor], Sequence[int]], torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    rng: np.random.Generator,
    vocabulary: int,
    prompt_tokens: int,
    new_tokens: int,
) -> OracleSequence:
    for _ in range(PROMPTS_TRIED):
        tokens = [int(token) for token in rng.integers(0, vocabulary, prompt_tokens)]
        logprobs = evaluate(tensors, tokens)
        while len(tokens) < prompt_tokens + new_tokens:
            best = logprobs[-1].topk(2)
            if best.values[0] - best.values[1] < MARGIN_NATS:
                break
            tokens.append(int(best.indices[0]))
            logprobs = evaluate(tensors, tokens)
        else:
            return OracleSequence(tuple(tokens), prompt_tokens, logprobs)
    raise ConfigError(
        f"in {PROMPTS_TRIED} tries the oracle's best token never led by {MARGIN_NATS} nat for {new_tokens} tokens: the "
        "tiny model says nothing; widen the initial draws in the weight map"
    )


def _stated(config: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """What a config says, key by key as JSON; a model type may be renamed, and is left out."""
    stated: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            stated.update(_stated(value, f"{prefix}{key}."))
        elif prefix or key != "model_type":
            stated[f"{prefix}{key}"] = json.dumps(value)
    return stated


def _fingerprint(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "tensors": {name: "x".join(map(str, tensor.shape)) for name, tensor in sorted(tensors.items())},
        "checksum": sum(float(tensor.double().abs().sum()) for tensor in tensors.values()),
    }
