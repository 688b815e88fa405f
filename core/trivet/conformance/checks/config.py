"""Reading config.json: what is damaged or not served ends in a ConfigError, quickly."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from trivet.config.document import ConfigDocument
from trivet.conformance.bench import Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.failure import broken, expect
from trivet.conformance.probe import ask
from trivet.errors import CapacityExceeded, ConfigError, PluginError

READ_TIMEOUT_S = 60.0
ABSURD_SECONDS = 5.0

_DAMAGE: dict[type, tuple[object, ...]] = {
    bool: ("yes", 0, [], {}),
    int: (-1, 0, 2**31, 2**63, 1.5, "8", True, [], {}),
    float: ("x", True, [], float("nan"), float("inf")),
    str: (7, "", [], {"a": 1}),
    list: (3, "x", [7.5], {}),
    dict: ([], "x", 3),
}
"""What each kind of value is replaced by."""


def _damaged(config: Mapping[str, object], place: str = "") -> Iterator[tuple[str, dict[str, object]]]:
    """Configs with one value damaged, and which."""
    for key, value in config.items():
        if place + key in ("model_type", "text_config.model_type"):
            continue
        for wrong in _DAMAGE.get(type(value), ()):
            yield f"{place}{key} = {wrong!r}", {**config, key: wrong}
        if isinstance(value, dict):
            for where, inner in _damaged(value, f"{place}{key}."):
                yield where, {**config, key: inner}


@check(
    "config.damaged-is-refused/1",
    "protocol",
    "Each value of a config, replaced by one of a wrong type or range, is refused with a ConfigError or does not "
    "matter; nothing else is raised, and nothing that is read differs by a value that makes no sense.",
    cause="a value of config.json is used without being checked: read it with a getter of ConfigDocument",
)
def damaged_is_refused(bench: Bench) -> Measured:
    tried = 0
    for config in bench.configs.values():
        for where, damaged in _damaged(config):
            tried += 1
            try:
                geometry = bench.family.read_geometry(ConfigDocument(damaged))
                bench.family.weight_map(geometry)
            except (ConfigError, CapacityExceeded):
                continue
            except PluginError as error:
                raised: BaseException = error
            except Exception as error:
                raised = error
            else:
                continue
            broken(
                observed=f"with {where}: {type(raised).__name__}: {raised}",
                expected="a ConfigError that names the key",
                cause=f"{where.partition(' =')[0]} is used without a check of its type and range: read it with a "
                "getter of ConfigDocument, and let the geometry refuse what does not fit together",
            )
    return {"configs_tried": float(tried)}


@check(
    "config.absurd-is-refused/1",
    "protocol",
    "A config that asks for absurdly many layers is refused within seconds, before anything of that size is made.",
    cause="num_hidden_layers has no bound of its own",
)
def absurd_is_refused(bench: Bench) -> Measured:
    ends, said = ask(("absurd", bench.model_type), READ_TIMEOUT_S)
    if ends is None:
        broken(
            observed=f"reading configs of 2147483647 layers: {said}",
            expected="a ConfigError within seconds",
            cause="the layers are listed before their number is bounded: pass maximum= to document.integer",
        )
    for where, (end, seconds) in ends.items():
        expect(
            end == "refused" and seconds < ABSURD_SECONDS,
            observed=f"{where}: {end}, after {seconds:.1f} s",
            expected=f"a ConfigError within {ABSURD_SECONDS:g} s",
            cause="the layers are listed before their number is bounded: pass maximum= to document.integer",
        )
    return {"slowest_s": max((float(seconds) for _, seconds in ends.values()), default=0.0)}


@check(
    "config.unserved-is-refused/1",
    "protocol",
    "Quantised weights, sliding windows and unknown ropes are refused, never ignored.",
    cause="a feature that changes what the model computes is read over",
)
def unserved_is_refused(bench: Bench) -> None:
    for config in bench.configs.values():
        for feature, value in (
            ("quantization_config", {"quant_method": "fp8"}),
            ("use_sliding_window", True),
            ("rope_parameters", {"rope_type": "no-such-rope", "rope_theta": 10000.0, "factor": 2.0}),
        ):
            started = time.perf_counter()
            asked = _with(config, feature, value)
            try:
                bench.family.read_geometry(ConfigDocument(asked))
            except ConfigError:
                continue
            broken(
                observed=f"{feature} = {value!r} was read without an error in {time.perf_counter() - started:.2f} s",
                expected="a ConfigError",
                cause="the family ignores what it does not serve: call refuse_unserved_features, and read ropes with "
                "Rope.read",
            )


def _with(config: Mapping[str, object], key: str, value: object) -> dict[str, object]:
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return {**config, "text_config": _with(text, key, value)}
    changed = {**config, key: value}
    if key == "rope_parameters":
        changed = {name: kept for name, kept in changed.items() if name not in ("rope_scaling", "rope_theta")}
    return changed


CHECKS = (damaged_is_refused, absurd_is_refused, unserved_is_refused)
