"""The plugin as it is installed: found statically, the same in every process, coupled to what is public."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from trivet.capacity import PlanCapacity
from trivet.config.document import ConfigDocument
from trivet.conformance.batches import Contexts, batch_of, worst_lengths
from trivet.conformance.bench import LIMITS, Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.checks import layout, plan
from trivet.conformance.coupling import PUBLIC, packages_of, sources_of, violations
from trivet.conformance.failure import Broken, broken, expect
from trivet.conformance.origin import frames, told
from trivet.conformance.probe import ask
from trivet.conformance.tiny import TinyModel, read_config
from trivet.errors import PluginError
from trivet.geometry import ModelGeometry
from trivet.plugin.groups import FAMILIES
from trivet.runtime.meter import StorageMeter
from trivet.sampling.params import Sampling
from trivet.weights.map import WeightMap

PROBE_TIMEOUT_S = 90.0
LEAST_VOCABULARY = 48
NEW_TOKENS = 6

Value = TypeVar("Value")


def _parity(bench: Bench) -> dict[str, Any]:
    """What other processes see; asked once for all checks of a bench."""
    found: dict[str, Any] | None = getattr(bench, "_parity", None)
    if found is None:
        found, said = ask(("parity", bench.model_type), PROBE_TIMEOUT_S)
        if found is None:
            broken(
                observed=f"another process that looks for model_type {bench.model_type!r} fails: {said}",
                expected="a fresh process finds and imports the plugin",
                cause="the plugin needs something that only this process has: an import order, a path, an environment "
                "variable",
            )
        bench._parity = found  # type: ignore[attr-defined]
    return found


@check(
    "plugin.found-statically/1",
    "protocol",
    "The plugin's metadata alone says which API version it is for and which model_type it serves; finding it imports "
    "none of its code.",
    cause="the distribution's entry points are wrong or missing",
    gate=True,
)
def found_statically(bench: Bench) -> None:
    static = _parity(bench)["static"]
    ready = [record for record in static["records"] if record["status"] == "ready"]
    shown = [(r["name"], r["group"], r["target"], r["status"], r["error"]) for r in static["records"]]
    expect(
        len(ready) == 1 and ready[0]["group"] == FAMILIES.name,
        observed=f"entry points for {bench.model_type!r}: {shown}",
        expected=f"one, in group {FAMILIES.name!r}, ready",
        cause=f'the project lacks [project.entry-points."{FAMILIES.name}"] {bench.model_type} = "module:plugin", or '
        "was not installed again since it was added",
    )
    expect(
        bool(ready[0]["version"]),
        observed=f"distribution {ready[0]['distribution']!r} states no version",
        expected="a version in its metadata",
        cause="the project's metadata has no version",
    )
    expect(
        not static["imported"],
        observed=f"finding plugins imported {static['imported']}",
        expected="no module of the plugin is imported before its model_type is asked for",
        cause="discovery imports what it finds, or a .pth file of the distribution imports its code",
    )
    missing = [name for name in bench.family.model_types if name not in _names(bench)]
    expect(
        not missing,
        observed=f"the family serves {list(bench.family.model_types)}, and no entry point is called {missing}",
        expected="an entry point for each of its model types",
        cause="a model type was added to the family and not to the project's entry points",
    )


def _names(bench: Bench) -> set[str]:
    return {record[0] for record in _parity(bench)["this process"]["records"]}


@check(
    "plugin.same-in-every-process/1",
    "protocol",
    "Registering twice, and processes made by spawn and by fork, see the same families, read the same models from the "
    "same configs, and derive the same seeds for requests without one.",
    cause="the plugin's values depend on what a process did before",
)
def same_in_every_process(bench: Bench) -> None:
    seen = _parity(bench)
    first = seen["this process"]
    for where in ("this process again", "a process by spawn", "a process by fork"):
        other = seen.get(where)
        if other is None or other == first:
            continue
        parts = [part for part in first if first[part] != other.get(part)]
        broken(
            observed=f"{where} differs in {parts}: {[other.get(part) for part in parts]} instead of "
            f"{[first[part] for part in parts]}",
            expected="the same families, capabilities, geometries, weight maps and seeds",
            cause="registration has side effects: a module-level registry, a counter, or a geometry or weight map that "
            "depends on the process (hashes of strings, ids, the clock)",
        )


@check(
    "plugin.free-of-torch/1",
    "protocol",
    "Importing the plugin, reading a config and naming the parameters imports no torch, so that memory can be planned "
    "without it.",
    cause="a module of the plugin imports torch",
)
def free_of_torch(bench: Bench) -> None:
    expect(
        not _parity(bench)["torch"],
        observed="torch was imported by importing the plugin and reading its tiny configs",
        expected="torch is imported when a model is built, not before",
        cause="the module behind the entry point, or one that it imports, imports torch or trivet.plugin.layers: give "
        "ModelFamily.build as 'module:function' and import layers only there",
    )


@check(
    "plugin.public-imports/1",
    "protocol",
    f"The plugin imports of Trivet only {', '.join(PUBLIC)}.",
    cause="the plugin's source cannot be read",
)
def public_imports(bench: Bench) -> Measured:
    packages = packages_of(bench.family, bench.record.target)
    files = [file for package in packages for file in sources_of(package)]
    expect(
        bool(files),
        observed=f"no source files of {list(packages)} were found",
        expected="the plugin's Python sources",
        cause="the plugin ships compiled files only; its coupling cannot be checked",
    )
    found = violations(files)
    expect(
        not found,
        observed="; ".join(found[:10]) + (f"; and {len(found) - 10} more" if len(found) > 10 else ""),
        expected=f"only names that {', '.join(PUBLIC)} export",
        cause="what is imported is private and may change in any release; take the public name, or ask for one",
    )
    return {"source_files": float(len(files))}


@check(
    "plugin.tiny-models/1",
    "protocol",
    "The family declares tiny configs of this model type, reads each, names its parameters and builds a model that "
    "loads and generates.",
    cause="the family's read_geometry, weight_map or build raises on its own tiny config",
    gate=True,
)
def tiny_models(bench: Bench) -> Measured:
    expect(
        bool(bench.configs),
        observed=f"ModelFamily.tiny_configs has {list(bench.family.tiny_configs) or 'nothing'}, none of model_type "
        f"{bench.model_type!r}",
        expected="at least one small config.json object",
        cause="conformance makes its own checkpoints from tiny_configs; declare one or a few",
    )
    elements = 0
    for name in bench.configs:
        tiny = _written(bench, name)
        expect(
            tiny.vocab_size >= LEAST_VOCABULARY,
            observed=f"config {name!r} has a vocabulary of {tiny.vocab_size}",
            expected=f"at least {LEAST_VOCABULARY} tokens, so that prompts can differ",
            cause="the tiny config is too tiny",
        )
        again, _ = read_config(bench.family, tiny.config)
        expect(
            again == tiny.geometry,
            observed=f"config {name!r} read twice gives {again} and {tiny.geometry}",
            expected="equal geometries",
            cause="read_geometry depends on something beside the config",
        )
        elements += sum(tensor.numel() for tensor in tiny.tensors.values())
        try:
            _serve(bench, tiny)
        except Broken as fault:
            broken(observed=fault.observed, expected=fault.expected, cause=_cause_in_paths(bench) or fault.cause)
        except Exception as error:
            broken(
                observed=f"config {name!r}: {_told(bench, error)}",
                expected="a model that loads and generates",
                cause=_cause_in_paths(bench) or _cause_by_phase(bench, tiny, error),
            )
    return {"tiny_models": float(len(bench.configs)), "weights": float(elements)}


def _written(bench: Bench, name: str) -> TinyModel:
    """The tiny checkpoint of one config; `Broken` that names the function of the family which is wrong."""
    family, config = bench.family, bench.configs[name]
    geometry = _given(bench, name, "read_geometry", ModelGeometry, lambda: family.read_geometry(ConfigDocument(config)))
    _given(bench, name, "weight_map", WeightMap, lambda: family.weight_map(geometry))
    try:
        return bench.tiny(name)
    except Exception as error:
        broken(
            observed=f"config {name!r}: {_told(bench, error)}",
            expected="a checkpoint with random weights, by the weight map",
            cause="the tensors that weight_map names cannot be drawn and written: their shapes or names, or the sizes "
            "of the tiny config",
        )


def _given(bench: Bench, name: str, what: str, kind: type[Value], call: Callable[[], object]) -> Value:
    try:
        found = call()
    except Exception as error:
        broken(
            observed=f"config {name!r}: {what} raises {_told(bench, error)}",
            expected=f"a {kind.__name__}",
            cause=f"{what} does not take the family's own tiny config, or the tiny config lacks a key",
        )
    if not isinstance(found, kind):
        broken(
            observed=f"config {name!r}: {what} returned {reprlib.repr(found)}, a {type(found).__name__}",
            expected=f"a {kind.__name__}",
            cause=f"{what} lacks a return, or returns what it read without making a {kind.__name__} of it",
        )
    return found


def _serve(bench: Bench, tiny: TinyModel) -> None:
    with bench.serve(tiny) as served:
        prompt = bench.tokens(bench.rng("tiny"), 7, tiny)
        (completion,) = served.generate([prompt], Sampling(max_new_tokens=NEW_TOKENS))
    expect(
        len(completion.token_ids) == NEW_TOKENS and completion.finish_reason == "length",
        observed=f"config {tiny.name!r}, asked for {NEW_TOKENS} tokens: {len(completion.token_ids)}, ended by "
        f"{completion.finish_reason!r}",
        expected=f"{NEW_TOKENS} tokens, ended by 'length'",
        cause="the tiny config states end tokens; leave eos_token_id out of it"
        if completion.finish_reason == "stop"
        else "the scheduler counts a request's lifetime otherwise than prompt + max_new_tokens - 1",
    )


def _told(bench: Bench, error: Exception) -> str:
    return told(error, bench.family, bench.record.target)


def _cause_in_paths(bench: Bench) -> str | None:
    """What is wrong with a decode path by itself, which then is no fault of the model's; None if nothing is found."""
    try:
        _ = bench.tinies
    except Exception:
        return None  # a later config cannot be read, which would be blamed on the paths
    for alone in PATHS_ALONE:
        try:
            alone.run(bench)
        except Broken as fault:
            return (
                f"a decode path, whatever the model: {alone.id} fails on the path alone: {fault.observed}; expected "
                f"{fault.expected}; {fault.cause}"
            )
        except Exception as error:
            return f"a decode path, whatever the model: {alone.id} meets {_told(bench, error)}"
    return None


def _cause_by_phase(bench: Bench, tiny: TinyModel, error: Exception) -> str:
    """What most probably is wrong, by how far loading came."""
    passed = {(frame.module, frame.function) for link in frames(error) for frame in link}
    if ("trivet.runtime.profile", "run_profile") in passed:
        if isinstance(error, PluginError) and error.__cause__ is None:
            return _cause_of_peak(bench, tiny)
        return (
            "the model raises in the start-up profile, its first step: a layer, the norm behind them or logits does "
            "not fit the geometry or the parameters that weight_map names"
        )
    if ("trivet.plugin.family", "builder") in passed:
        return "the module that ModelFamily.build names cannot be imported, or has no such function"
    if ("trivet.runtime.blueprint", "draw_blueprint") in passed:
        return (
            "sizes cannot be planned: a decode path's usable, tile, layout or scratch_bytes raises, or the geometry "
            "states what no path serves"
        )
    if ("trivet.runtime.load", "load_engine") in passed:
        return "build raises: it asks for a parameter that weight_map does not name, or one of another shape"
    return "the model loads, and raises while it serves"


def _cause_of_peak(bench: Bench, tiny: TinyModel) -> str:
    """Whether a path takes more scratch than it states, or the layers keep more than the plan allows."""
    generator = torch.Generator().manual_seed(bench.seed)
    for attention in tiny.geometry.attention_geometries:
        path = next(iter(bench.usable_paths(attention)), None)
        if path is None:
            continue
        capacity = PlanCapacity(attention, LIMITS, path.tile(attention))
        stated = path.scratch_bytes(capacity, "float32")
        owner = path.bind(capacity, path.layout(capacity).allocate(bench.device))
        try:
            batch = batch_of(capacity, *worst_lengths(capacity)[0])
            owner.update(batch)
            contexts = Contexts.drawn(capacity, batch, generator)
            query = torch.randn(batch.tokens, capacity.query_heads, capacity.head_dim, generator=generator)
            with StorageMeter() as meter:
                owner.append(*contexts.new(batch), contexts.cache_keys, contexts.cache_values)
                owner.attend(query, contexts.cache_keys, contexts.cache_values)
        finally:
            owner.close()
        # The result is the layer's, and planned with it.
        taken = meter.peak_bytes - query.untyped_storage().nbytes()
        if taken > stated:
            return (
                f"decode path {path.name!r}: one attend of {batch.tokens} tokens over {LIMITS.max_requests} contexts "
                f"of {LIMITS.max_context} takes {taken} bytes beside its result, and its scratch_bytes states {stated}"
            )
    return (
        "a layer keeps tensors from step to step or holds more at once than the shared layers do (no decode path takes "
        "more than its scratch_bytes states)"
    )


CHECKS = (found_statically, free_of_torch, public_imports, same_in_every_process, tiny_models)

PATHS_ALONE = (*layout.ALONE, *plan.ALONE)
"""Checks that say what is wrong with a decode path where no model can be served with it."""
