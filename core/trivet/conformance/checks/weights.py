"""Loading weights: exactly what is on disk, every tensor used, and nothing damaged let through."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from trivet.conformance.bench import Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.failure import broken, expect
from trivet.conformance.served import Served
from trivet.conformance.tiny import TinyModel, with_tied_embeddings
from trivet.dtypes import as_torch
from trivet.errors import CheckpointError
from trivet.layout.buffers import Buffers
from trivet.weights.map import ParameterSpec, Part

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def _parameter(served: Served, spec: ParameterSpec) -> torch.Tensor:
    """The live buffer of a parameter, in its shape."""
    return served.engine.owned["weights"][spec.name].view(spec.shape)


def _placed(tiny: TinyModel) -> Iterator[tuple[ParameterSpec, Part, int]]:
    """Every tensor on disk with the parameter and the first row that it fills, by the kit's own count."""
    for spec in tiny.weight_map.parameters:
        first = 0
        for part in spec.parts:
            yield spec, part, first
            first += tiny.tensors[part.name].reshape(-1, *spec.shape[1:]).shape[0]


@check(
    "weights.loaded-as-written/1",
    "protocol",
    "Every parameter holds the tensors on disk, joined row by row in the order of its parts, in the served dtype or in "
    "the dtype that it keeps.",
    cause="a tensor is read, joined or converted wrongly",
)
def loaded_as_written(bench: Bench) -> Measured:
    compared = 0
    for tiny in bench.tinies:
        for dtype in ("float32", "bfloat16"):
            with bench.serve(tiny, dtype=dtype) as served:
                for spec, part, first in _placed(tiny):
                    wanted = tiny.tensors[part.name].reshape(-1, *spec.shape[1:])
                    found = _parameter(served, spec)[first : first + wanted.shape[0]]
                    kept = as_torch(spec.dtype or dtype)
                    compared += 1
                    expect(
                        found.dtype == kept and torch.equal(found.cpu(), wanted.to(kept)),
                        observed=f"config {tiny.name!r} served in {dtype}: rows {first} to "
                        f"{first + wanted.shape[0] - 1} of parameter {spec.name!r} are not tensor {part.name!r} in "
                        f"{kept}, they differ in {int((found.cpu() != wanted.to(found.dtype)).sum())} elements",
                        expected=f"tensor {part.name!r} as it lies on disk, in {kept}",
                        cause="parts are placed at the wrong rows or in another order, a tensor is rounded on the way, "
                        "or a parameter's own dtype is ignored",
                    )
    return {"tensors": float(compared)}


@check(
    "weights.every-tensor-matters/1",
    "protocol",
    "Each tensor of the weight map changes what the model says: none is loaded and then left out.",
    cause="a parameter is loaded and never used",
)
def every_tensor_matters(bench: Bench) -> Measured:
    compared = 0
    for tiny in bench.tinies:
        tokens = bench.tokens(bench.rng("matters"), 6, tiny)
        with bench.serve(tiny) as served:
            before = served.score(tokens)
            for spec, part, first in _placed(tiny):
                rows = slice(first, first + tiny.tensors[part.name].reshape(-1, *spec.shape[1:]).shape[0])
                parameter = _parameter(served, spec)
                held = parameter[rows].clone()
                # Turned and stretched, and not shifted: what is added to every key or logit alike drops out again.
                parameter[rows] = held.flip(0).mul(1.5).add(0.1)
                after = served.score(tokens)
                parameter[rows] = held
                compared += 1
                expect(
                    not torch.equal(before, after),
                    observed=f"config {tiny.name!r}: changing tensor {part.name!r} (parameter {spec.name!r}) changes "
                    "nothing",
                    expected="other log-probabilities",
                    cause="no layer reads the parameter, or what is computed from it is dropped: a bias, a gate or a "
                    "norm that is left out, or a model that copies its parameters when it is built",
                )
    return {"tensors": float(compared)}


def _rewritten(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def _mutilations(tiny: TinyModel) -> Iterator[tuple[str, str, Callable[[Path], None]]]:
    """Name, what the error must mention, and how a checkpoint directory is damaged."""
    names = sorted(tiny.tensors, key=lambda name: (tiny.tensors[name].numel(), name))
    small, large = names[0], names[-1]
    yield f"without tensor {large}", large, lambda d: _rewritten(d, lambda t: t.pop(large))
    yield f"without tensor {small}", small, lambda d: _rewritten(d, lambda t: t.pop(small))
    yield (
        f"with one row less in {large}",
        large,
        lambda d: _rewritten(d, lambda t: t.update({large: t[large][:-1].clone()})),
    )
    yield (
        f"with {large} as one flat vector",
        large,
        lambda d: _rewritten(d, lambda t: t.update({large: t[large].flatten().clone()})),
    )
    yield (
        f"with {large} in int8",
        large,
        lambda d: _rewritten(d, lambda t: t.update({large: t[large].to(torch.int8)})),
    )
    yield (
        "with a tensor that no parameter names",
        "strange.weight",
        lambda d: _rewritten(d, lambda t: t.update({"strange.weight": torch.zeros(3)})),
    )
    bias = next(
        f"{n.removesuffix('.weight')}.bias" for n in names if n.endswith(".weight") and tiny.tensors[n].dim() == 2
    )
    if bias not in tiny.tensors:
        extra = {bias: torch.zeros(4)}
        yield "with a bias that no parameter names", bias, lambda d: _rewritten(d, lambda t: t.update(extra))
    yield "cut off in its middle", SINGLE, lambda d: _cut(d / SINGLE)
    yield "without weights", str(tiny.directory.name), lambda d: (d / SINGLE).unlink()
    gone = "gone.safetensors"
    yield "whose index names a file that is not there", gone, lambda d: _index(d, large, gone)
    yield "whose index leaves the directory", "..", lambda d: _index(d, large, "../elsewhere.safetensors")
    yield "whose index lacks a tensor", large, lambda d: _index(d, large, None)


def _cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def _index(directory: Path, name: str, file: str | None) -> None:
    names: dict[str, str | None] = dict.fromkeys(load_file(directory / SINGLE), SINGLE)
    names[name] = file
    weight_map = {tensor: place for tensor, place in names.items() if place is not None}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@check(
    "weights.mutilated-is-refused/1",
    "protocol",
    "A checkpoint with a missing, superfluous, misshapen, quantised or truncated tensor, or with an index that lies, "
    "ends in a CheckpointError that names the tensor or the file, before anything is allocated.",
    cause="a fault of the checkpoint passes the loader",
)
def mutilated_is_refused(bench: Bench) -> Measured:
    tiny = bench.untied()
    tried = 0
    for what, mention, damage in _mutilations(tiny):
        directory = bench.workspace / "mutilated" / tiny.directory.name
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(tiny.directory, directory)
        damage(directory)
        tried += 1
        allocated = mock.Mock(wraps=Buffers.allocate)
        with mock.patch.object(Buffers, "allocate", allocated):
            try:
                bench.serve(directory).close()
            except CheckpointError as error:
                expect(
                    mention in str(error),
                    observed=f"a checkpoint {what}: {error}",
                    expected=f"an error that names {mention!r}",
                    cause="the message does not say where the fault is",
                )
                expect(
                    not allocated.called,
                    observed=f"a checkpoint {what} was refused after buffers had been allocated",
                    expected="nothing allocated",
                    cause="the headers are checked after the allocation",
                )
                continue
            except Exception as error:
                broken(
                    observed=f"a checkpoint {what}: {type(error).__name__}: {error}",
                    expected=f"a CheckpointError that names {mention!r}",
                    cause="the loader trusts the file in this respect",
                )
        broken(
            observed=f"a checkpoint {what} was loaded",
            expected=f"a CheckpointError that names {mention!r}",
            cause="the loader does not hold the file against the weight map in this respect, or the family's weight "
            "map ignores tensors by too wide a pattern",
        )
    return {"checkpoints": float(tried)}


@check(
    "weights.sharded-is-the-same/1",
    "protocol",
    "The same tensors in several files with an index give the same model; a copy of a tensor in another file than the "
    "index names is not read.",
    cause="shards are read by something else than the index",
)
def sharded_is_the_same(bench: Bench) -> None:
    tiny = bench.tiny()
    tokens = bench.tokens(bench.rng("sharded"), 12)
    with bench.serve(tiny) as served:
        whole = served.score(tokens)
    sharded = bench.variant("sharded", tiny.config, tiny.tensors, shards=3)
    index = json.loads((sharded.directory / INDEX).read_text())["weight_map"]
    files = sorted(set(index.values()))
    stale = [next(name for name in index if index[name] == file) for file in files]
    for file, name in zip(files, [*stale[1:], stale[0]], strict=True):
        tensors = load_file(sharded.directory / file)
        save_file({**tensors, name: torch.zeros_like(tiny.tensors[name])}, sharded.directory / file)
    names = [*index]
    bench.rng("index").shuffle(names)
    (sharded.directory / INDEX).write_text(json.dumps({"weight_map": {name: index[name] for name in names}}))
    with bench.serve(sharded) as served:
        again = served.score(tokens)
    expect(
        torch.equal(whole, again),
        observed=f"in three files the log-probabilities differ by up to {(whole - again).abs().max():.3g}; stale "
        f"copies of {stale} lie in other files",
        expected="the same numbers, bit for bit",
        cause="a tensor is read from another file than the index names, or read twice",
    )


@check(
    "weights.tied/1",
    "protocol",
    "With tie_word_embeddings the embedding is the output projection: one parameter, and an lm_head.weight beside it "
    "is not read. Without it, a checkpoint that lacks its output projection is refused.",
    capability="tied_embeddings",
    cause="tie_word_embeddings is read wrongly, or its parameters are",
)
def tied(bench: Bench) -> None:
    tiny = bench.tied()
    tokens = bench.tokens(bench.rng("tied"), 12, tiny)
    with bench.serve(tiny) as served:
        before = served.score(tokens)
        buffers = served.engine.owned["weights"]
        matrices = [spec.name for spec in tiny.weight_map.parameters if spec.shape[0] == tiny.vocab_size]
        expect(
            len(matrices) == 1,
            observed=f"parameters with a row for each of {tiny.vocab_size} tokens: {matrices}",
            expected="one: the embedding, which is the output projection too",
            cause="a tied model keeps an output projection of its own",
        )
        view = buffers[matrices[0]].view(tiny.vocab_size, -1)
        spare = next(token for token in range(tiny.vocab_size) if token not in tokens)
        held = view[spare].clone()
        view[spare] = held * -2
        after = served.score(tokens)
        view[spare] = held
        expect(
            not torch.equal(before[:, spare], after[:, spare]),
            observed=f"changing the embedding of token {spare}, which no input has, leaves its log-probability alone",
            expected="another log-probability: its embedding is its row of the output projection",
            cause="the model projects by another matrix than the embedding",
        )
    beside = bench.variant("tied-beside", tiny.config, tiny.tensors)
    strange = torch.zeros(tiny.vocab_size, tiny.geometry.hidden_size)
    _rewritten(beside.directory, lambda t: t.update({"lm_head.weight": strange}))
    with bench.serve(beside) as served:
        ignored = served.score(tokens)
    expect(
        torch.equal(ignored, before),
        observed="an lm_head.weight of zeros beside tied embeddings changes the log-probabilities",
        expected="that it is not read",
        cause="the weight map names lm_head.weight for a tied model",
    )
    untied = with_tied_embeddings(tiny.config, False)
    claims = bench.variant("claims-untied", untied)
    _rewritten(claims.directory, lambda t: t.pop("lm_head.weight", None))
    try:
        bench.serve(claims).close()
    except CheckpointError:
        return
    broken(
        observed="a config that says tie_word_embeddings: false was served without an lm_head.weight on disk",
        expected="a CheckpointError",
        cause="the family ties embeddings whatever the config says, or reads the key from the wrong place",
    )


@check(
    "weights.random-is-seeded/1",
    "protocol",
    "weights='random' needs config.json alone, is the same for the same seed and another for another seed, and gives a "
    "model that says something.",
    cause="random weights depend on more than the seed",
)
def random_is_seeded(bench: Bench) -> Measured:
    directory = bench.workspace / "config-alone"
    directory.mkdir(exist_ok=True)
    shutil.copy(bench.tiny().directory / "config.json", directory)
    tokens = bench.tokens(bench.rng("random"), 12)
    said = []
    for seed in (1, 1, 2):
        with bench.serve(directory, weights="random", seed=seed) as served:
            said.append(served.score(tokens))
    expect(
        torch.equal(said[0], said[1]) and not torch.equal(said[0], said[2]),
        observed=f"seed 1 twice: equal {torch.equal(said[0], said[1])}; seeds 1 and 2: equal "
        f"{torch.equal(said[0], said[2])}",
        expected="the same model for the same seed, another for another",
        cause="a draw does not use the seed, or uses something beside it",
    )
    spread = float((said[0].amax(-1) - said[0].amin(-1)).min())
    expect(
        bool(said[0].isfinite().all()) and spread > 0.1,
        observed=f"log-probabilities of a random model spread over {spread:.3g} nat",
        expected="finite ones that spread over more than 0.1 nat",
        cause="the weight map's initial draws are constant, far too narrow or far too wide",
    )
    return {"spread_nats": spread}


CHECKS = (
    loaded_as_written,
    every_tensor_matters,
    mutilated_is_refused,
    sharded_is_the_same,
    tied,
    random_is_seeded,
)
