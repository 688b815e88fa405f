"""Each hook does what its page says. The page cannot drift: signatures and examples are checked against the code."""

from __future__ import annotations

import ast
import doctest
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.distributions import BACKENDS, OBSERVERS, install

from trivet.plugin import AttentionBackend, ModelFamily, PluginManager, hookimpl, hookspecs, standard_paths
from trivet.plugin.groups import GROUPS

ROOT = Path(__file__).parents[2]
HOOKS = [
    node
    for node in ast.parse(Path(hookspecs.__file__).read_text()).body
    if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "hookspec" for d in node.decorator_list)
]
HOOK_NAMES = [hook.name for hook in HOOKS]


def signature(hook: ast.FunctionDef) -> str:
    assert hook.returns is not None
    return f"def {hook.name}({ast.unparse(hook.args)}) -> {ast.unparse(hook.returns)}"


@pytest.mark.parametrize("hook", HOOKS, ids=HOOK_NAMES)
def test_the_page_on_plugins_states_the_exact_signature(hook: ast.FunctionDef) -> None:
    assert signature(hook) in (ROOT / "sdk_docs" / "plugins.md").read_text()


@pytest.mark.parametrize("name", HOOK_NAMES)
def test_every_hook_has_a_test_of_its_own(name: str) -> None:
    tests = [
        node.name
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith(f"test_{name}_")
    ]
    assert tests


@pytest.mark.parametrize("name", HOOK_NAMES)
def test_every_hook_has_an_example_that_runs(name: str) -> None:
    function = getattr(hookspecs, name)
    (test,) = doctest.DocTestFinder(recurse=False).find(function, name, globs={})
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_every_group_asks_for_a_hook_of_its_own() -> None:
    assert sorted(group.hook for group in GROUPS.values()) == sorted(HOOK_NAMES)


def family(name: str, *model_types: str) -> ModelFamily:
    return ModelFamily(name=name, model_types=model_types, read_geometry=print, weight_map=print, build=print)


def test_trivet_model_families_serves_each_of_its_model_types() -> None:
    class Plugin:
        @hookimpl
        def trivet_model_families(self) -> list[ModelFamily]:
            return [family("small", "a"), family("large", "b", "c")]

    plugin = Plugin()
    manager = PluginManager.of(families={"a": plugin, "b": plugin, "c": plugin})
    assert [manager.family_for(model_type).name for model_type in "abc"] == ["small", "large", "large"]


def test_trivet_attention_backends_brings_those_of_every_plugin_that_works(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = """
from trivet.plugin import AttentionBackend, hookimpl, standard_paths

class Plugin:
    @hookimpl
    def trivet_attention_backends(self):
        path = standard_paths()[-1]
        return [AttentionBackend(name=path.backend, decode_paths=[path])]

plugin = Plugin()
"""
    install(site, "kernels", {BACKENDS: {"kernels": "kernels:plugin"}}, {"kernels": source})
    install(site, "broken", {BACKENDS: {"broken": "broken:plugin"}}, {"broken": "raise OSError('no device')"})
    manager = PluginManager.discover("", path=[str(site)])
    for _ in range(2):
        assert [backend.name for backend in manager.attention_backends()] == [standard_paths()[-1].backend]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "broken 1.0" in warnings[0] and "no device" in warnings[0]


def test_trivet_attention_backends_refuses_paths_of_another_backend() -> None:
    from trivet.errors import PluginError

    with pytest.raises(PluginError, match="AttentionBackend 'mine': field 'decode_paths' is 'reference'"):
        AttentionBackend(name="mine", decode_paths=standard_paths()[-1:])


class Counter:
    def __init__(self, failing: bool = False) -> None:
        self.seen: list[Any] = []
        self.failing = failing

    @hookimpl
    def trivet_observe_step(self, report: Any) -> None:
        self.seen.append(report)
        if self.failing:
            raise ValueError("cannot count")


def test_trivet_observe_step_is_told_of_every_step() -> None:
    first, second = Counter(), Counter()
    manager = PluginManager.of(observers={"first": first, "second": second})
    reports = [SimpleNamespace(decode_tokens=n) for n in range(3)]
    for report in reports:
        manager.observe_step(report)  # type: ignore[arg-type]
    assert first.seen == second.seen == reports


def test_trivet_observe_step_that_raises_is_dropped_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    faulty, sound = Counter(failing=True), Counter()
    manager = PluginManager.of(observers={"faulty": faulty, "sound": sound})
    for step in range(3):
        manager.observe_step(step)  # type: ignore[arg-type]
    assert faulty.seen == [0] and sound.seen == [0, 1, 2]
    record = next(record for record in manager.records if record.name == "faulty")
    assert (record.status, record.phase, record.error) == ("failed", "call", "ValueError: cannot count")
    assert "cannot count" in caplog.text


def test_trivet_observe_step_that_exits_is_dropped_and_harms_nobody() -> None:
    class Exiting:
        @hookimpl
        def trivet_observe_step(self, report: Any) -> None:
            raise SystemExit(3)

    sound = Counter()
    manager = PluginManager.of(observers={"exiting": Exiting(), "sound": sound})
    for step in range(2):
        manager.observe_step(step)  # type: ignore[arg-type]
    assert sound.seen == [0, 1]
    record = next(record for record in manager.records if record.name == "exiting")
    assert (record.status, record.phase, record.error) == ("failed", "call", "SystemExit: 3")


def test_trivet_observe_step_may_leave_out_the_report() -> None:
    class Steps:
        count = 0

        @hookimpl
        def trivet_observe_step(self) -> None:
            self.count += 1

    steps = Steps()
    PluginManager.of(observers={"steps": steps}).observe_step(None)  # type: ignore[arg-type]
    assert steps.count == 1


def test_an_observer_that_cannot_be_imported_does_not_stop_a_step(site: Path) -> None:
    install(site, "broken", {OBSERVERS: {"broken": "broken_observer:plugin"}}, {"broken_observer": "raise OSError"})
    manager = PluginManager.discover("", path=[str(site)])
    manager.observe_step(None)  # type: ignore[arg-type]
    assert [(record.status, record.phase) for record in manager.records] == [("failed", "import")]
