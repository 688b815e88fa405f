"""Write the list of checks in sdk_docs/conformance.md from the manifest.

python -m tests.conformance.write_docs
"""

from __future__ import annotations

from pathlib import Path

from trivet.conformance.manifest import CHECKS

PAGE = Path(__file__).parents[2] / "sdk_docs" / "conformance.md"
MARK = "<!-- written by python -m tests.conformance.write_docs -->\n"


def rendered() -> str:
    """The part of the page below the mark."""
    parts = []
    for check in CHECKS:
        kind = "required" if check.required else f"optional: {check.capability}"
        if check.recurrent:
            kind += ", of families with recurrent layers"
        if check.gate:
            kind += ", a gate: what follows is not run where it fails"
        parts.append(
            f'<a id="{check.docs.partition("#")[2]}"></a>\n'
            f"### `{check.id}`\n\n{check.contract}\n\n"
            f"*{check.tier}, {kind}.* Where it meets an exception that it did not foresee: {check.cause}.\n"
        )
    return "\n" + "\n".join(parts)


def main() -> None:
    """Replace what stands below the mark."""
    page = PAGE.read_text(encoding="utf-8")
    head, _, _ = page.partition(MARK)
    PAGE.write_text(head + MARK + rendered(), encoding="utf-8")


if __name__ == "__main__":
    main()
