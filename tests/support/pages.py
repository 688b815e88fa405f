"""The pages of the documentation, run as their readers would run them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen
from tests.conformance.projects import project

PAGES = Path(__file__).parents[2] / "sdk_docs"
_BLOCK = re.compile(
    r"^(?:`(?P<file>\w+/\w+\.py)`(?:(?!^```).)*?^)?```python\n(?P<source>.*?)^```", re.MULTILINE | re.DOTALL
)
_NEW_PLUGIN = re.compile(r"^trivet new-plugin (\S+) ", re.MULTILINE)


@frozen
class Block:
    """A Python block of a page.

    Attributes:
        source: its text.
        line: of the page, before the first of `source`.
        file: which file of the reader's project the page says it is, whole; None for what is run.
    """

    source: str
    line: int
    file: str | None


def blocks_of(text: str) -> list[Block]:
    """The Python blocks of a page, in order."""
    return [
        Block(found["source"], text.count("\n", 0, found.start("source")), found["file"])
        for found in _BLOCK.finditer(text)
    ]


@contextmanager
def reader_of(page: Path, folder: Path) -> Iterator[Path]:
    """`folder`, with the project that the page makes with ``trivet new-plugin``, found as if it were installed."""
    text = page.read_text(encoding="utf-8")
    asked = _NEW_PLUGIN.search(text)
    if asked is None or not any(block.file for block in blocks_of(text)):
        yield folder
        return
    with project(folder / "project", asked[1]):
        yield folder / "project"


def run_page(page: Path, folder: Path) -> None:
    """Run the page's blocks in order, in one namespace; those that are files of the project in `folder` go there
    and are imported.
    """
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.file is not None:
            (folder / block.file).write_text(block.source, encoding="utf-8")
            importlib.import_module(block.file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
            continue
        # Blank lines before it, so that a traceback gives the line in the page.
        exec(compile("\n" * block.line + block.source, str(page), "exec"), namespace)


def write_files(page: Path, folder: Path) -> None:
    """Put the files of the project that the page gives into `folder`, and run nothing."""
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.file is not None:
            (folder / block.file).write_text(block.source, encoding="utf-8")
