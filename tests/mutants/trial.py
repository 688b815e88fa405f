"""One mutant on trial, in a process of its own: does it still serve, and which check catches it?

    python -m tests.mutants.trial TREE TARGET...

`TREE` is a copy of the sources with the fault in it, and stands first on the path. A target is a model_type, or
``template`` for a plugin that the mutated ``trivet new-plugin`` writes. Prints one JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

TEMPLATE = "template"
TIERS = ("protocol", "numerics")


def _lay_out_template(tree: Path) -> str:
    """A plugin as `trivet new-plugin` writes it, found on the path; gives its model_type."""
    from tests.support.distributions import FAMILIES, install

    from trivet.cli.new_plugin import write_plugin

    site = tree / "site"
    write_plugin("sprout", site / "project")
    sys.path.insert(0, str(site / "project"))
    install(site / "project", "trivet-sprout", {FAMILIES: {"sprout": "trivet_sprout:plugin"}})
    return "sprout"


def _alive(model_type: str) -> None:
    """Load a tiny checkpoint and generate; raises where the mutant cannot."""
    import trivet
    from trivet.conformance.tiny import make_tiny
    from trivet.plugin import PluginManager

    family = PluginManager.discover().family_for(model_type)
    name, config = next((n, c) for n, c in family.tiny_configs.items() if c["model_type"] == model_type)
    with tempfile.TemporaryDirectory() as directory:
        make_tiny(family, name, config, Path(directory))
        with trivet.Runtime.load(directory, device="cpu", autostart=False) as runtime:
            (completion,) = runtime.generate([[1, 2, 3]], trivet.Sampling(max_new_tokens=4))
    if completion.error is not None:
        raise completion.error


def _caught(model_type: str) -> tuple[dict[str, Any] | None, str]:
    """The first check that fails, and the summary if none does."""
    from trivet.conformance.kit import Asked, Kit
    from trivet.conformance.record import make_record

    with Kit(Asked(model_type, TIERS)) as kit:  # type: ignore[arg-type]
        outcomes = []
        for check in kit.manifest():
            outcome = kit.run(check)
            outcomes.append(outcome)
            if outcome.status in ("failed", "not run"):
                text = outcome.failure.text() if outcome.failure else f"not run: {outcome.reason}"
                return {"target": model_type, "check": outcome.id, "text": text}, ""
        return None, str(make_record(kit, outcomes, "", 0.0)["summary"])


def main(tree: Path, targets: list[str]) -> dict[str, Any]:
    """Try `targets` in order until a check fails."""
    import trivet

    assert trivet.__file__ is not None and Path(trivet.__file__).is_relative_to(tree), trivet.__file__
    logging.getLogger("trivet").setLevel(logging.CRITICAL + 1)
    summaries = {}
    for target in targets:
        try:
            model_type = _lay_out_template(tree) if target == TEMPLATE else target
            _alive(model_type)
        except BaseException as error:
            return {"dead": f"{target}: {type(error).__name__}: {error}"}
        caught, summaries[target] = _caught(model_type)
        if caught is not None:
            return {"caught": {**caught, "target": target}}
    return {"survived": summaries}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])))
