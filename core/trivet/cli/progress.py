"""How far loading or a batch of prompts has come, on stderr and only where a person looks on."""

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


@contextmanager
def answers_bar(prompts: int) -> Iterator[Callable[[], None]]:
    """Give a callback to be called for each prompt that is done; shows nothing for one prompt or without a terminal."""
    if prompts < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("generating", total=prompts)
        yield lambda: bar.advance(task)
