"""``trivet plugins`` lists every plugin, those that fail with the phase and the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.distributions import FAMILIES, importable, install, working_family

Run = Callable[..., Any]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on ``sys.path`` with a plugin that works, one that fails and one for another API version."""
    monkeypatch.delenv("TRIVET_PLUGINS", raising=False)
    install(tmp_path, "sound-dist", {FAMILIES: {"sound": "sound:plugin"}}, {"sound": working_family("sound")})
    install(tmp_path, "faulty-dist", {FAMILIES: {"faulty": "faulty:plugin"}}, {"faulty": "raise OSError('broken')"})
    install(tmp_path, "newer-dist", {"trivet.plugins.v2": {"newer": "newer:plugin"}})
    with importable(tmp_path):
        yield tmp_path


def test_json_gives_a_record_for_each_plugin(site: Path, trivet_command: Run) -> None:
    outcome = trivet_command("plugins", "--json")
    assert outcome.code == 0 and outcome.err == ""
    records = {record["name"]: record for record in json.loads(outcome.out)["plugins"]}
    assert records["sound"] == {
        "name": "sound",
        "group": FAMILIES,
        "distribution": "sound-dist",
        "version": "1.0",
        "target": "sound:plugin",
        "status": "loaded",
        "phase": None,
        "error": None,
    }
    assert (records["faulty"]["status"], records["faulty"]["phase"]) == ("failed", "import")
    assert records["faulty"]["error"] == "OSError: broken"
    assert records["newer"]["status"] == "incompatible"
    assert records["qwen3"]["distribution"] == "trivet"


def test_the_table_has_a_line_for_each_plugin_and_one_for_each_error(site: Path, trivet_command: Run) -> None:
    lines = trivet_command("plugins").out.splitlines()
    assert lines[0].split() == ["NAME", "STATUS", "GROUP", "DISTRIBUTION"]
    faulty = next(number for number, line in enumerate(lines) if line.startswith("faulty "))
    assert "failed (import)" in lines[faulty] and "faulty-dist 1.0" in lines[faulty]
    assert lines[faulty + 1].strip() == "OSError: broken"


def test_blocked_plugins_are_listed_as_such(site: Path, trivet_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_PLUGINS", "-faulty-dist,-misspelt")
    outcome = trivet_command("plugins", "--json")
    records = {record["name"]: record for record in json.loads(outcome.out)["plugins"]}
    assert records["faulty"]["status"] == "blocked"
    assert "TRIVET_PLUGINS names 'misspelt'" in outcome.err
