"""The plugin as it is installed: found statically, the same in every process, coupled to what is public."""

from __future__ import annotations

from typing import Any

from trivet.conformance.bench import Bench
from trivet.conformance.check import Measured, check
from trivet.conformance.coupling import PUBLIC, packages_of, sources_of, violations
from trivet.conformance.failure import broken, expect
from trivet.conformance.probe import ask
from trivet.plugin.groups import FAMILIES

PROBE_TIMEOUT_S = 90.0


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


CHECKS = (found_statically, free_of_torch, public_imports, same_in_every_process)
