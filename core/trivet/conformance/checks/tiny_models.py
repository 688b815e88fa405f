"""The family's own tiny models: read, named, built, loaded and asked for tokens; a fault is blamed by how far it came.

A decode path that is wrong by itself, whatever the model, is looked for first.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import TypeVar

import torch

from trivet.config.document import ConfigDocument
from trivet.conformance.batches import Contexts, batch_of, worst_lengths
from trivet.conformance.bench import LIMITS, Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.checks import layout, plan
from trivet.conformance.failure import Broken, broken, expect
from trivet.conformance.origin import frames, told
from trivet.conformance.tiny import TinyModel, read_config
from trivet.errors import PluginError
from trivet.geometry import ModelGeometry
from trivet.runtime.meter import StorageMeter
from trivet.sampling.params import Sampling
from trivet.weights.map import WeightMap

LEAST_VOCABULARY = 48
NEW_TOKENS = 6

PATHS_ALONE = (*layout.ALONE, *plan.ALONE)
"""Checks that say what is wrong with a decode path where no model can be served with it."""

Value = TypeVar("Value")


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
        capacity = bench.plan_capacity(path, attention, LIMITS)
        stated = path.scratch_bytes(capacity, bench.dtype)
        owner = path.bind(capacity, path.layout(capacity).allocate(bench.device))
        try:
            batch = batch_of(capacity, *worst_lengths(capacity)[0])
            owner.update(batch)
            contexts = Contexts.drawn(capacity, batch, generator, bench.device)
            query = contexts.query(capacity, batch, generator)
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


CHECKS = (tiny_models,)
