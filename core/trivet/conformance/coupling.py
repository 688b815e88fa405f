"""Which of Trivet's modules a plugin's source imports, read without running it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

import trivet
import trivet.plugin
from trivet.plugin.family import ModelFamily

SDK = "trivet"
PUBLIC = ("trivet", "trivet.plugin", "trivet.plugin.layers", "trivet.conformance")
_IMPORTERS = ("import_module", "__import__", "find_spec", "resolve_name")


def packages_of(family: ModelFamily, target: str) -> tuple[str, ...]:
    """The top-level packages that make up a plugin: behind its entry point, its functions and its own paths."""
    modules = [target, family.build if isinstance(family.build, str) else family.build.__module__]
    modules += [family.read_geometry.__module__, family.weight_map.__module__]
    modules += [type(path).__module__ for path in family.decode_paths]
    tops = (module.partition(":")[0].partition(".")[0] for module in modules)
    return tuple(dict.fromkeys(top for top in tops if top != SDK))


def sources_of(package: str) -> list[Path]:
    """The Python files of a top-level package or module, none of which is imported by this."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    if spec.submodule_search_locations is None:
        return [Path(spec.origin)] if spec.origin else []
    return sorted(file for root in spec.submodule_search_locations for file in Path(root).rglob("*.py"))


def violations(files: Iterable[Path]) -> list[str]:
    """Each use of what is not public, as ``file:line: what``."""
    found = []
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
        found += [f"{file.parent.name}/{file.name}:{line}: {what}" for line, what in _uses(tree)]
    return found


def _uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_ours(alias.name) and alias.name not in PUBLIC:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            for alias in node.names:
                if _is_ours(node.module) and not _is_public(node.module, alias.name):
                    yield node.lineno, f"from {node.module} import {alias.name}"
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if name in _IMPORTERS and isinstance(first, str) and _is_ours(first) and first not in PUBLIC:
                yield node.lineno, f"{name}({first!r})"
        elif (
            isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == SDK and not _is_public(SDK, node.attr)
        ):
            yield node.lineno, f"{SDK}.{node.attr}"


def _is_ours(module: str) -> bool:
    return module == SDK or module.startswith(f"{SDK}.")


def _is_public(module: str, name: str) -> bool:
    if module not in PUBLIC:
        return False
    if f"{module}.{name}" in PUBLIC:
        return True
    if module == SDK:
        return name in trivet.__all__
    if module == "trivet.plugin":
        return name in trivet.plugin.__all__
    return not name.startswith("_")
