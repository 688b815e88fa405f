"""How far the loading of a checkpoint has come, on stderr and only where a person looks on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def loading_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Give the callback that `Runtime.load` takes as ``progress``, or None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda loaded_bytes, total_bytes: bar.update(task, completed=loaded_bytes, total=total_bytes)
