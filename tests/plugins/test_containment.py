"""A plugin that fails is listed with its phase and its error; every other plugin keeps working."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests.support.distributions import FAMILIES, install, working_family

from trivet.errors import PluginError
from trivet.plugin import PluginManager

HEAD = "from trivet.plugin import ModelFamily, WeightMap, hookimpl\n"

FAULTS = {
    "raises at import": ("import", "raise OSError('no kernel library')", "OSError: no kernel library"),
    "exits at import": ("import", "raise SystemExit(3)", "SystemExit: 3"),
    "panics at import": (
        "import",
        "class Panic(BaseException): pass\nraise Panic('in an extension')",
        "Panic: in an extension",
    ),
    "needs what is missing": ("import", "import a_module_that_is_not_there", "No module named"),
    "names nothing": ("import", "plugins = 1", "module 'faulty' has no 'plugin'"),
    "is a class": (
        "registration",
        HEAD + "class plugin:\n    @hookimpl\n    def trivet_model_families(self): return []",
        "let it name an instance",
    ),
    "misspells the hook": (
        "registration",
        HEAD + "class P:\n    @hookimpl\n    def trivet_model_familes(self): return []\nplugin = P()",
        "did you mean 'trivet_model_families' instead of 'trivet_model_familes'?",
    ),
    "forgets the mark": (
        "registration",
        "class P:\n    def trivet_model_families(self): return []\nplugin = P()",
        "its 'trivet_model_families' lacks the mark @hookimpl",
    ),
    "misspells the hook and forgets the mark": (
        "registration",
        "class P:\n    def trivet_model_familes(self): return []\nplugin = P()",
        "did you mean its 'trivet_model_familes'?",
    ),
    "implements no hook": ("registration", "plugin = object()", "asks for model families through the hook"),
    "implements another group's hook only": (
        "registration",
        HEAD + "class P:\n    @hookimpl\n    def trivet_observe_step(self, report): pass\nplugin = P()",
        "asks for model families through the hook trivet_model_families",
    ),
    "takes an argument that the hook lacks": (
        "registration",
        HEAD + "class P:\n    @hookimpl\n    def trivet_model_families(self, config): return []\nplugin = P()",
        "trivet_observe_step(report)",
    ),
    "raises in its hook": (
        "registration",
        HEAD + "class P:\n    @hookimpl\n    def trivet_model_families(self): return 1 / 0\nplugin = P()",
        "ZeroDivisionError: division by zero",
    ),
    "gives nothing": (
        "validation",
        HEAD + "class P:\n    @hookimpl\n    def trivet_model_families(self): pass\nplugin = P()",
        "returned None, expected a sequence of at least one ModelFamily",
    ),
    "gives something else": (
        "validation",
        HEAD + "class P:\n    @hookimpl\n    def trivet_model_families(self): return ['toy']\nplugin = P()",
        "with 'toy', a str; expected a sequence of at least one ModelFamily",
    ),
    "gives a damaged family": (
        "validation",
        working_family("faulty").replace("build='faulty' + \":build\"", "build=7"),
        "ModelFamily 'faulty': field 'build' is 7, expected a callable or a string",
    ),
    "serves another model type than it claims": (
        "validation",
        working_family("faulty", "elsewhere"),
        "0 of its families have 'faulty' among their model_types ('faulty': elsewhere), expected one",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_contained_and_reported_with_its_phase(site: Path, fault: str) -> None:
    phase, source, text = FAULTS[fault]
    install(site, "faulty-dist", {FAMILIES: {"faulty": "faulty:plugin"}}, {"faulty": source}, version="0.3")
    install(site, "sound-dist", {FAMILIES: {"sound": "sound:plugin"}}, {"sound": working_family("sound")})
    manager = PluginManager.discover("", path=[str(site)])
    with pytest.raises(PluginError) as caught:
        manager.family_for("faulty")
    message = str(caught.value)
    assert f"'faulty' of faulty-dist 0.3 ({FAMILIES}, faulty:plugin) failed at {phase}: " in message
    assert text in message and "TRIVET_PLUGINS=-faulty-dist" in message and "\n" not in message
    record = next(record for record in manager.records if record.name == "faulty")
    assert (record.status, record.phase) == ("failed", phase)
    assert record.error is not None and text in record.error
    assert manager.family_for("sound").name == "sound"


def test_the_cause_is_chained_for_debugging(site: Path) -> None:
    install(site, "faulty", {FAMILIES: {"faulty": "faulty:plugin"}}, {"faulty": "raise OSError('no library')"})
    with pytest.raises(PluginError) as caught:
        PluginManager.discover("", path=[str(site)]).family_for("faulty")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_failed_plugin_is_not_imported_again(site: Path) -> None:
    source = "import builtins\nbuiltins.faulty_imports = getattr(builtins, 'faulty_imports', 0) + 1\nraise OSError"
    install(site, "faulty", {FAMILIES: {"faulty": "faulty:plugin"}}, {"faulty": source})
    manager = PluginManager.discover("", path=[str(site)])
    try:
        messages = set()
        for _ in range(3):
            with pytest.raises(PluginError) as caught:
                manager.family_for("faulty")
            messages.add(str(caught.value))
        import builtins

        assert builtins.faulty_imports == 1  # type: ignore[attr-defined]
        assert len(messages) == 1
    finally:
        del builtins.faulty_imports  # type: ignore[attr-defined]


def test_loading_all_tells_of_each_plugin_whether_it_works(site: Path) -> None:
    install(site, "faulty", {FAMILIES: {"faulty": "faulty:plugin"}}, {"faulty": "raise OSError('no library')"})
    install(site, "sound", {FAMILIES: {"sound": "sound:plugin"}}, {"sound": working_family("sound")})
    records = PluginManager.discover("", path=[str(site)]).load_all()
    assert {record.name: (record.status, record.phase) for record in records} == {
        "faulty": ("failed", "import"),
        "sound": ("loaded", None),
    }


def test_a_plugin_may_be_a_module(site: Path) -> None:
    source = textwrap.dedent(
        """
        from trivet.plugin import ModelFamily, WeightMap, hookimpl

        @hookimpl
        def trivet_model_families():
            return (ModelFamily(name="flat", model_types=["flat"], read_geometry=print, weight_map=print, build=print),)
        """
    )
    install(site, "flat-dist", {FAMILIES: {"flat": "flat"}}, {"flat": source})
    assert PluginManager.discover("", path=[str(site)]).family_for("flat").model_types == ("flat",)


def test_one_plugin_object_may_stand_behind_two_entry_points(site: Path) -> None:
    targets = {FAMILIES: {"toy": "toys:plugin", "toy_text": "toys:plugin"}}
    install(site, "toys", targets, {"toys": working_family("toy", "toy", "toy_text")})
    manager = PluginManager.discover("", path=[str(site)])
    assert manager.family_for("toy") == manager.family_for("toy_text")
    assert [record.status for record in manager.records] == ["loaded", "loaded"]
