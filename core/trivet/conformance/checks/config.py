"""Reading config.json: what is damaged or not served ends in a ConfigError, quickly."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Iterator, Mapping

import attrs

from trivet.config.document import ConfigDocument
from trivet.conformance.bench import Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.failure import broken, expect
from trivet.conformance.origin import told
from trivet.conformance.probe import ask
from trivet.errors import CapacityExceeded, ConfigError
from trivet.geometry import ModelGeometry
from trivet.plugin.family import ModelFamily

READ_TIMEOUT_S = 60.0
ABSURD_SECONDS = 5.0
MOST_SHOWN = 120
"""Characters of a value in a message."""

_WRONG_TYPE: dict[type, tuple[object, ...]] = {
    bool: ("yes", 0, [], {}),
    int: (1.5, "8", True, [], {}),
    float: ("x", True, [], {}, float("nan"), float("inf")),
    str: (7, "", [], {"a": 1}),
    list: (3, "x", {}),
    dict: ([], "x", 3),
}
"""What no getter takes in place of a value of each kind."""

_RANGE: dict[type, tuple[object, ...]] = {
    int: (0, 2**31, 2**63),
    float: (0.0, 1e30),
    list: ([7.5],),
}
"""What some families serve and others do not."""


def _kind(family: ModelFamily, config: Mapping[str, object], place: str) -> type:
    """The kind of value that stands at `place`; a whole number that might as well be stated as 1.0 is a float."""
    value = _at(config, place)
    if type(value) is int:
        try:
            same = family.read_geometry(ConfigDocument(_replaced(config, place, float(value))))
            if same == family.read_geometry(ConfigDocument(config)):
                return float
        except Exception:
            return int
    return type(value)


def _places(config: Mapping[str, object], above: str = "") -> Iterator[str]:
    """Every key, with those that it lies under before it."""
    for key, value in config.items():
        if above + key not in ("model_type", "text_config.model_type"):
            yield above + key
        if isinstance(value, dict):
            yield from _places(value, f"{above}{key}.")


def _at(config: Mapping[str, object], place: str) -> object:
    key, _, rest = place.partition(".")
    inner = config[key]
    return _at(inner, rest) if rest and isinstance(inner, Mapping) else inner


def _replaced(config: Mapping[str, object], place: str, value: object) -> dict[str, object]:
    key, _, rest = place.partition(".")
    inner = config[key]
    return {**config, key: _replaced(inner, rest, value) if rest and isinstance(inner, Mapping) else value}


def _damages(family: ModelFamily, config: Mapping[str, object], place: str) -> Iterator[tuple[object, bool]]:
    """What to put at `place`, and whether it makes no sense there for any family."""
    value, kind = _at(config, place), _kind(family, config, place)
    for wrong in _WRONG_TYPE.get(kind, ()):
        yield wrong, True
    if kind in (int, float):
        # What is positive as it should be is a size, a count, an eps, a base, a cap or a scale.
        yield kind(-1), isinstance(value, int | float) and value > 0
    for far in _RANGE.get(kind, ()):
        yield far, False


@check(
    "config.damaged-is-refused/1",
    "protocol",
    "Each value of a config, replaced by one of a wrong type or range, is refused with a ConfigError or does not "
    "matter; nothing else is raised, and nothing that is read differs by a value that makes no sense.",
    cause="a value of config.json is used without being checked: read it with a getter of ConfigDocument",
)
def damaged_is_refused(bench: Bench) -> Measured:
    family, tried = bench.family, 0
    for config in bench.configs.values():
        sound = family.read_geometry(ConfigDocument(config))
        for place in _places(config):
            for wrong, senseless in _damages(family, config, place):
                tried += 1
                try:
                    geometry = family.read_geometry(ConfigDocument(_replaced(config, place, wrong)))
                    family.weight_map(geometry)
                except (ConfigError, CapacityExceeded):
                    continue
                except Exception as error:
                    broken(
                        observed=f"with {place} = {wrong!r}: {told(error, family, bench.record.target)}",
                        expected="a ConfigError that names the key",
                        cause=f"{place} is used without a check of its type and range: read it with a getter of "
                        "ConfigDocument, and let the geometry refuse what does not fit together",
                    )
                expect(
                    not senseless or geometry == sound,
                    observed=f"{place} = {wrong!r} is read without an error, and changes the geometry: "
                    f"{_difference(sound, geometry)}",
                    expected=f"a ConfigError that names the key: the tiny config has {_at(config, place)!r} there",
                    cause=f"{place} is read as it stands (raw) or without bounds: read it with the getter of "
                    "ConfigDocument for its type, and with minimum=, above= or allowed=",
                )
    return {"configs_tried": float(tried)}


def _difference(sound: ModelGeometry, found: ModelGeometry) -> str:
    """The attributes in which two geometries differ."""
    if type(sound) is not type(found) or not attrs.has(type(sound)):
        return reprlib.repr(found)
    names = [field.name for field in attrs.fields(type(sound)) if field.eq]
    pairs = [(name, getattr(sound, name), getattr(found, name)) for name in names]
    return "; ".join(f"{name} {_short(now)} instead of {_short(was)}" for name, was, now in pairs if was != now)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


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
