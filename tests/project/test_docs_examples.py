"""Every example in the documentation runs: the Python blocks of a page, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "sdk_docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_the_python_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        # Blank lines before it, so that a traceback gives the line in the page.
        exec(compile("\n" * line + block[1], str(page), "exec"), namespace)


def test_the_pages_that_promise_examples_have_some() -> None:
    for name in ("README.md", "sdk_docs/plugins.md"):
        assert BLOCK.search((ROOT / name).read_text(encoding="utf-8")), name


def test_no_python_block_is_fenced_so_that_it_is_missed() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fences = re.findall(r"^\s*[`~]{3,}[ \t]*(?:python|py)\b", text, re.MULTILINE)
        assert len(BLOCK.findall(text)) == len(fences), page
