"""However a process comes to be, it sees the same families; managers share nothing."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.distributions import FAMILIES, install, working_family

from trivet.plugin import PluginManager


def describe(site: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Name, status and model types of every plugin in `site`, as another process may send them back."""
    sys.path.insert(0, site)
    manager = PluginManager.discover("", path=[site])
    manager.load_all()
    return [(r.name, r.status, manager.family_for(r.name).model_types) for r in manager.records]


def test_registering_twice_gives_equal_families_and_separate_records(site: Path) -> None:
    install(site, "toys", {FAMILIES: {"toy": "toys:plugin"}}, {"toys": working_family("toy")})
    first, second = (PluginManager.discover("", path=[str(site)]) for _ in range(2))
    assert first.family_for("toy") == first.family_for("toy")
    assert second.records[0].status == "ready"
    assert second.family_for("toy") == first.family_for("toy")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_another_process_sees_the_same_families(tmp_path: Path, method: str) -> None:
    targets = {FAMILIES: {"toy": "toys:plugin", "toy_text": "toys:plugin"}}
    install(tmp_path, "toys", targets, {"toys": working_family("toy", "toy", "toy_text")})
    # In a process of its own: forking this one, which has threads by now, would be its own kind of trouble.
    script = (
        "import multiprocessing, sys\n"
        "from tests.plugins.test_process_parity import describe\n"
        "if __name__ == '__main__':\n"
        "    method, site = sys.argv[1:]\n"
        "    with multiprocessing.get_context(method).Pool(1) as pool:\n"
        "        other = pool.apply(describe, (site,))\n"
        "    assert other == describe(site) and len(other) == 2, other\n"
    )
    assert method in multiprocessing.get_all_start_methods()
    path = tmp_path / "parity_main.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, str(path), method, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": ":".join([".", *sys.path]), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
