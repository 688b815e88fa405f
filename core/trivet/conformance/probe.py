"""What other processes see of a plugin: run as ``python -m trivet.conformance.probe``, prints one JSON object.

Free of torch but for ``settings``, so that it can tell whether the plugin is.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from trivet.config.document import ConfigDocument
from trivet.errors import TrivetError
from trivet.plugin.groups import FAMILIES
from trivet.plugin.manager import PluginManager
from trivet.sampling.seeds import derive_seed

ABSURD_LAYERS = (2**31 - 1, 10**30)
ABSURD_MEMORY_BYTES = 8 * 2**30
"""Address space of the process that reads an absurd config."""


def ask(command: Sequence[str], timeout_s: float) -> tuple[dict[str, Any] | None, str]:
    """Run the probe in a process of its own; its answer, or None and the end of what it said instead."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    arguments = [sys.executable, "-m", "trivet.conformance.probe", *command]
    try:
        done = subprocess.run(
            arguments, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout_s:g} s"
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return None, f"exit code {done.returncode}: {' '.join(done.stderr.split()[-40:])}"
    return answer, ""


def describe(model_type: str) -> dict[str, Any]:
    """The families that this process finds, and what the one of `model_type` makes of its tiny configs."""
    manager = PluginManager.discover()
    records = [
        [record.name, record.group, record.distribution, record.version, record.target, record.status]
        for record in manager.records
        if record.group == FAMILIES.name
    ]
    family = manager.family_for(model_type)
    models = {}
    for name, config in family.tiny_configs.items():
        if config.get("model_type") == model_type:
            try:
                geometry = family.read_geometry(ConfigDocument(config))
                models[name] = hashlib.sha256(repr((geometry, family.weight_map(geometry))).encode()).hexdigest()
            except Exception as error:  # the checks of the tiny models say what is wrong with it
                models[name] = f"{type(error).__name__}: {error}"
    return {
        "records": records,
        "family": family.name,
        "model_types": list(family.model_types),
        "capabilities": attrs.asdict(family.capabilities),
        "models": models,
        "seeds of requests": [derive_seed(0, request_id) for request_id in range(3)],
    }


def _static(model_type: str) -> dict[str, Any]:
    """What metadata alone says of the plugin, and which of its modules finding it has imported."""
    before = set(sys.modules)
    manager = PluginManager.discover()
    records = [attrs.asdict(record) for record in manager.records if record.name == model_type]
    targets = {str(record["target"]).partition(":")[0].partition(".")[0] for record in records}
    imported = {name.partition(".")[0] for name in set(sys.modules) - before}
    return {"records": records, "imported": sorted(targets & imported)}


def _parity(model_type: str) -> dict[str, Any]:
    seen: dict[str, Any] = {"static": _static(model_type)}
    seen["this process"] = describe(model_type)
    seen["torch"] = "torch" in sys.modules
    seen["this process again"] = describe(model_type)
    for method in ("spawn", "fork"):
        if method in multiprocessing.get_all_start_methods():
            with multiprocessing.get_context(method).Pool(1) as pool:
                seen[f"a process by {method}"] = pool.apply(describe, (model_type,))
    return seen


def _absurd(model_type: str) -> dict[str, Any]:
    """What reading configs of absurdly many layers ends in."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (ABSURD_MEMORY_BYTES, ABSURD_MEMORY_BYTES))
    except (ImportError, ValueError, OSError):
        pass
    family = PluginManager.discover().family_for(model_type)
    ends = {}
    for name, config in family.tiny_configs.items():
        for layers in ABSURD_LAYERS:
            started = time.perf_counter()
            try:
                geometry = family.read_geometry(ConfigDocument(_with_layers(config, layers)))
                end = f"read, {len(geometry.layers)} layers"
            except TrivetError:
                end = "refused"
            except BaseException as error:
                end = f"{type(error).__name__}: {error}"[:200]
            ends[f"{name}: num_hidden_layers {layers}"] = [end, time.perf_counter() - started]
    return ends


def _with_layers(config: Mapping[str, object], layers: int) -> dict[str, object]:
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return {**config, "text_config": _with_layers(text, layers)}
    return {name: value for name, value in config.items() if name != "layer_types"} | {"num_hidden_layers": layers}


def _settings(model_type: str, directory: str) -> dict[str, Any]:
    """What torch's settings are before and after a tiny model of the family is served."""
    from trivet.conformance.settings import before_and_after

    return before_and_after(model_type, Path(directory))


def main(arguments: Sequence[str]) -> None:
    """``parity MODEL_TYPE``, ``absurd MODEL_TYPE`` or ``settings MODEL_TYPE DIRECTORY``."""
    what, *of = arguments
    probes: dict[str, Callable[..., dict[str, Any]]] = {"parity": _parity, "absurd": _absurd, "settings": _settings}
    print(json.dumps(probes[what](*of)))


if __name__ == "__main__":
    main(sys.argv[1:])
