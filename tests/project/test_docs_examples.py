"""Every example in the documentation runs: the Python blocks of a page, in order, in the project that it makes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.pages import blocks_of, reader_of, run_page

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "sdk_docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_the_python_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reader_of(page, tmp_path) as folder:
        monkeypatch.chdir(folder)
        run_page(page, folder)


def test_a_block_under_the_name_of_a_file_is_that_file_and_no_other_is() -> None:
    text = "`a_b/c.py`, whole. `x`:\n\nMore.\n\n```python\n1\n```\n\nSee `d/e.py`.\n\n```python\n2\n```\n"
    assert [(block.file, block.source, block.line) for block in blocks_of(text)] == [
        ("a_b/c.py", "1\n", 5),
        (None, "2\n", 11),
    ]


def test_the_layers_of_the_page_on_plugins_stand_in_a_module_of_their_own() -> None:
    blocks = blocks_of((ROOT / "sdk_docs" / "plugins.md").read_text(encoding="utf-8"))
    (layers,) = (block.source for block in blocks if "class Layer:" in block.source)
    module: dict[str, object] = {"__name__": "trivet_plain.model"}
    exec(compile(layers, "trivet_plain/model.py", "exec"), module)
    assert callable(module["build"])


def test_the_pages_that_promise_examples_have_some() -> None:
    for name in ("README.md", "sdk_docs/plugins.md"):
        assert blocks_of((ROOT / name).read_text(encoding="utf-8")), name


def test_no_python_block_is_fenced_so_that_it_is_missed() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fences = re.findall(r"^\s*[`~]{3,}[ \t]*(?:python|py)\b", text, re.MULTILINE)
        assert len(blocks_of(text)) == len(fences), page
