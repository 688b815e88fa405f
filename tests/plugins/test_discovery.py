"""Plugins are found from metadata alone, and what is wrong with metadata is told without importing anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.support.distributions import BACKENDS, FAMILIES, OBSERVERS, install, working_family

from trivet.errors import PluginError
from trivet.plugin import PluginManager, PluginRecord


def discover(site: Path, selection: str = "") -> PluginManager:
    return PluginManager.discover(selection, path=[str(site)])


def only(manager: PluginManager) -> PluginRecord:
    (record,) = manager.records
    return record


def test_discovery_lists_every_group_and_imports_nothing(site: Path) -> None:
    targets = {FAMILIES: {"toy": "bomb:plugin"}, BACKENDS: {"fast": "bomb:plugin"}, OBSERVERS: {"log": "bomb:plugin"}}
    install(site, "bomb-dist", targets, {"bomb": "raise RuntimeError('imported')"}, version="2.5")
    manager = discover(site)
    assert [(r.group, r.name, r.distribution, r.version, r.status) for r in manager.records] == [
        (BACKENDS, "fast", "bomb-dist", "2.5", "ready"),
        (OBSERVERS, "log", "bomb-dist", "2.5", "ready"),
        (FAMILIES, "toy", "bomb-dist", "2.5", "ready"),
    ]
    assert manager.model_types == ("toy",)
    assert "bomb" not in sys.modules


def test_only_the_plugin_that_is_needed_is_imported(site: Path) -> None:
    targets = {FAMILIES: {"one": "family_one:plugin", "two": "family_two:plugin"}}
    install(site, "both", targets, {"family_one": working_family("one"), "family_two": working_family("two")})
    manager = discover(site)
    assert manager.family_for("two").name == "two"
    assert "family_two" in sys.modules and "family_one" not in sys.modules
    assert {r.name: r.status for r in manager.records} == {"one": "ready", "two": "loaded"}


def test_another_api_version_is_incompatible_and_not_imported(site: Path) -> None:
    install(site, "newer", {"trivet.plugins.v2": {"toy": "newer:plugin"}}, {"newer": "raise RuntimeError"})
    manager = discover(site)
    record = only(manager)
    assert record.status == "incompatible" and record.error is not None
    assert "trivet.plugins.v2" in record.error and "trivet.plugins.v1" in record.error
    with pytest.raises(PluginError, match=r"newer 1\.0 cannot be used: .*trivet\.plugins\.v2"):
        manager.family_for("toy")
    assert "newer" not in sys.modules


def test_a_distribution_may_offer_our_api_version_beside_another(site: Path) -> None:
    targets = {FAMILIES: {"toy": "both:plugin"}, "trivet.plugins.v2": {"toy": "both:plugin_v2"}}
    install(site, "both", targets, {"both": working_family("toy")})
    manager = discover(site)
    assert only(manager).group == FAMILIES
    assert manager.family_for("toy").name == "toy"


@pytest.mark.parametrize(
    ("group", "meant"),
    [
        ("trivet.plugin", FAMILIES),
        ("trivet.plugins", FAMILIES),
        ("trivet_plugins", FAMILIES),
        ("Trivet.Plugins.V1", FAMILIES),
        ("trviet.plugins.v1", FAMILIES),
        ("trivet.backend.v1", BACKENDS),
        ("trivet.observer", OBSERVERS),
    ],
)
def test_a_misspelt_group_is_listed_with_the_one_that_was_meant(site: Path, group: str, meant: str) -> None:
    install(site, "near", {group: {"toy": "near:plugin"}, "console_scripts": {"trivet-near": "near:main"}})
    record = only(discover(site))
    assert record.status == "incompatible" and record.error is not None
    assert repr(group) in record.error and repr(meant) in record.error


def test_groups_of_other_projects_are_left_alone(site: Path) -> None:
    install(site, "other", {"console_scripts": {"trivet": "x:y"}, "trivetish.themes": {"a": "x:y"}})
    assert discover(site).records == ()


def test_a_target_that_is_no_module_and_attribute_fails_at_metadata(site: Path) -> None:
    install(site, "odd", {FAMILIES: {"toy": "not a module:plugin"}})
    manager = discover(site)
    record = only(manager)
    assert (record.status, record.phase) == ("failed", "metadata")
    with pytest.raises(PluginError, match=r"'toy' of odd 1\.0 .* failed at metadata: .*'not a module:plugin'"):
        manager.family_for("toy")


def test_damaged_metadata_is_listed_and_harms_no_other_plugin(site: Path) -> None:
    install(site, "damaged", f"[{FAMILIES}]\nthis line has no equals sign\n")
    install(site, "sound", {FAMILIES: {"toy": "sound:plugin"}}, {"sound": working_family("toy")})
    manager = discover(site)
    assert {(r.distribution, r.status, r.phase) for r in manager.records} == {
        ("damaged", "failed", "metadata"),
        ("sound", "ready", None),
    }
    assert manager.family_for("toy").name == "toy"


def test_metadata_that_is_no_text_is_listed_and_harms_no_other_plugin(site: Path) -> None:
    install(site, "damaged", {FAMILIES: {"other": "damaged:plugin"}})
    path = site / "damaged-1.0.dist-info" / "entry_points.txt"
    path.write_bytes(path.read_bytes() + b"bad = \xff\xfe\n")
    install(site, "sound", {FAMILIES: {"toy": "sound:plugin"}}, {"sound": working_family("toy")})
    manager = discover(site)
    assert {(r.distribution, r.status, r.phase) for r in manager.records} == {
        ("damaged", "failed", "metadata"),
        ("sound", "ready", None),
    }
    assert manager.family_for("toy").name == "toy"


def test_a_distribution_without_a_name_is_still_listed(site: Path) -> None:
    install(site, "nameless", {FAMILIES: {"toy": "x:plugin"}}, metadata="Metadata-Version: 2.1\n")
    assert only(discover(site)).name == "toy"


def test_a_copy_that_is_shadowed_on_the_path_is_not_listed_twice(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    install(first, "toy-dist", {FAMILIES: {"toy": "toy:plugin"}}, version="2.0")
    install(second, "toy-dist", {FAMILIES: {"toy": "toy:plugin"}}, version="1.0")
    manager = PluginManager.discover("", path=[str(first), str(second)])
    assert only(manager).version == "2.0"


def test_two_claims_to_one_model_type_are_an_error_that_names_both(site: Path) -> None:
    for name in ("ours", "theirs"):
        install(site, name, {FAMILIES: {"toy": f"{name}:plugin"}}, {name: working_family("toy")})
    install(site, "third", {FAMILIES: {"free": "third:plugin"}}, {"third": working_family("free")})
    manager = discover(site)
    assert manager.family_for("free").name == "free"
    with pytest.raises(PluginError, match=r"ours 1\.0 \(ours:plugin\) and by theirs 1\.0 \(theirs:plugin\)"):
        manager.family_for("toy")
    assert "ours" not in sys.modules and "theirs" not in sys.modules
    assert {(r.distribution, r.status, r.phase) for r in manager.records if r.name == "toy"} == {
        ("ours", "failed", "metadata"),
        ("theirs", "failed", "metadata"),
    }


def test_blocking_one_of_two_claims_leaves_the_other(site: Path) -> None:
    for name in ("ours", "theirs"):
        install(site, name, {FAMILIES: {"toy": f"{name}:plugin"}}, {name: working_family("toy")})
    manager = discover(site, "-theirs:toy")
    manager.family_for("toy")
    assert {r.distribution: r.status for r in manager.records} == {"ours": "loaded", "theirs": "blocked"}


def test_two_observers_may_share_a_name(site: Path) -> None:
    for name in ("ours", "theirs"):
        install(site, name, {OBSERVERS: {"log": f"{name}:plugin"}})
    assert [r.status for r in discover(site).records] == ["ready", "ready"]


def test_an_unknown_model_type_lists_what_is_served_and_the_near_miss(site: Path) -> None:
    install(site, "dist", {FAMILIES: {"qwen3": "a:plugin", "other": "b:plugin"}})
    with pytest.raises(PluginError) as caught:
        discover(site).family_for("qwne3")
    message = str(caught.value)
    assert "'qwne3'" in message and "did you mean 'qwen3'?" in message
    assert "served are: other, qwen3" in message and FAMILIES in message


def test_the_shipped_families_are_found_through_the_same_entry_points() -> None:
    manager = PluginManager.discover("")
    assert {("qwen3", "trivet")} <= {(r.name, r.distribution) for r in manager.records if r.group == FAMILIES}
    assert "qwen3" in manager.family_for("qwen3").model_types


def test_a_folder_that_is_on_the_path_twice_is_read_once(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "toys", {FAMILIES: {"toy": "toys:plugin"}})
    monkeypatch.chdir(site)
    records = PluginManager.discover("", path=["", str(site), f"{site}/"]).records
    assert [(record.name, record.status) for record in records] == [("toy", "ready")]
