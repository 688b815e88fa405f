"""``TRIVET_PLUGINS`` allows and blocks plugins by name, and says which of its names mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.distributions import BACKENDS, FAMILIES, install, working_family

from trivet.errors import PluginError
from trivet.plugin import PluginManager
from trivet.plugin.selection import Selection

NAMES = st.text("abcdefgh_", min_size=1, max_size=6).filter(lambda name: name.strip("_") == name)


@pytest.mark.parametrize(
    ("selection", "usable"),
    [
        ("", {"one", "two", "fast"}),
        (" , ", {"one", "two", "fast"}),
        ("one", {"one"}),
        ("one, fast", {"one", "fast"}),
        ("-one", {"two", "fast"}),
        ("- one", {"two", "fast"}),
        ("Both_Families", {"one", "two"}),
        ("both-families,-two", {"one"}),
        ("-both.families", {"fast"}),
        ("-both-families:one", {"two", "fast"}),
        ("one,-one", set()),
    ],
)
def test_names_of_entry_points_and_distributions_allow_and_block(site: Path, selection: str, usable: set[str]) -> None:
    install(site, "both-families", {FAMILIES: {"one": "a:plugin", "two": "b:plugin"}})
    install(site, "kernels", {BACKENDS: {"fast": "c:plugin"}})
    manager = PluginManager.discover(selection, path=[str(site)])
    assert {record.name for record in manager.records if record.status == "ready"} == usable
    assert all(record.error for record in manager.records if record.status == "blocked")


def test_the_environment_decides_where_no_selection_is_given(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "toys", {FAMILIES: {"toy": "toys:plugin"}}, {"toys": working_family("toy")})
    monkeypatch.setenv("TRIVET_PLUGINS", "-toy")
    manager = PluginManager.discover(path=[str(site)])
    with pytest.raises(PluginError, match=r"toys 1\.0 is blocked by -toy in TRIVET_PLUGINS"):
        manager.family_for("toy")


def test_a_name_that_matches_no_plugin_is_reported(site: Path) -> None:
    install(site, "toys", {FAMILIES: {"toy": "toys:plugin"}})
    assert PluginManager.discover("toy,-tyo,toys", path=[str(site)]).unmatched == ("tyo",)


@given(allowed=st.lists(NAMES, max_size=3), blocked=st.lists(NAMES, max_size=3), name=NAMES)
def test_blocking_outweighs_allowing_and_no_allowed_name_allows_all(
    allowed: list[str], blocked: list[str], name: str
) -> None:
    selection = Selection.parse(",".join([*allowed, *(f"-{b}" for b in blocked)]))
    usable = selection.why_blocked(name, "a-distribution") is None
    assert usable == (name not in blocked and (not allowed or name in allowed))
