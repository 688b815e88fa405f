"""Unified diffs, read and applied without a tool: hunks are found by what they say, not by their line numbers."""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

_FILE = re.compile(r"^\+\+\+ (?:b/)?(\S+)")
_HEADER = re.compile(r"^([A-Z][a-z]+): *(.+)$")


class DoesNotApply(Exception):
    """A hunk's text stands nowhere in its file, or in several places."""


@frozen
class Hunk:
    """One place in one file.

    Attributes:
        file: relative to the root of the tree.
        before, after: the lines with their context, and what becomes of them.
        line: where the diff says that they are.
    """

    file: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    line: int


@frozen
class Patch:
    """One mutant.

    Attributes:
        name: of the file, without its suffix.
        headers: ``Name: text`` lines before the first diff: ``Fault`` says what is wrong, ``Targets`` which families
            are checked, ``Names`` what the failure's text must mention (a regular expression).
        hunks: what is changed.
    """

    name: str
    headers: dict[str, str]
    hunks: tuple[Hunk, ...]

    @classmethod
    def read(cls, path: Path) -> Patch:
        """Parse a unified diff."""
        headers: dict[str, str] = {}
        hunks: list[Hunk] = []
        file, lines = "", path.read_text(encoding="utf-8").split("\n")
        index = 0
        while index < len(lines):
            line = lines[index]
            index += 1
            if match := _FILE.match(line):
                file = match[1]
            elif line.startswith("@@"):
                match = re.match(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", line)
                if match is None or not file:
                    raise DoesNotApply(f"{path.name}: {line!r} is no hunk of a unified diff")
                start, old, new = int(match[1]), int(match[2] or 1), int(match[3] or 1)
                before: list[str] = []
                after: list[str] = []
                while (len(before) < old or len(after) < new) and index < len(lines):
                    mark, text = lines[index][:1] or " ", lines[index][1:]
                    index += 1
                    if mark in " -":
                        before.append(text)
                    if mark in " +":
                        after.append(text)
                hunks.append(Hunk(file, tuple(before), tuple(after), start))
            elif not hunks and (match := _HEADER.match(line)):
                headers[match[1]] = match[2]
        if not hunks:
            raise DoesNotApply(f"{path.name} changes nothing")
        return cls(path.stem, headers, tuple(hunks))

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are changed."""
        return tuple(dict.fromkeys(hunk.file for hunk in self.hunks))

    def apply(self, root: Path) -> None:
        """Change the files below `root`.

        Raises:
            DoesNotApply: the source has moved on; the patch is to be made anew.
        """
        for hunk in self.hunks:
            path = root / hunk.file
            if not hunk.before and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("\n".join(hunk.after) + "\n", encoding="utf-8")
                continue
            if not path.is_file():
                raise DoesNotApply(f"{self.name}: there is no {hunk.file}")
            lines = path.read_text(encoding="utf-8").split("\n")
            first = _place(lines, hunk, self.name)
            lines[first : first + len(hunk.before)] = hunk.after
            path.write_text("\n".join(lines), encoding="utf-8")


def _place(lines: list[str], hunk: Hunk, name: str) -> int:
    """The first line of a hunk: the place nearest to the stated one where its text stands."""
    before, count = list(hunk.before), len(hunk.before)
    places = [first for first in range(len(lines) - count + 1) if lines[first : first + count] == before]
    if not places:
        raise DoesNotApply(f"{name}: {hunk.file} does not hold the lines that the hunk at {hunk.line} changes")
    return min(places, key=lambda first: abs(first + 1 - hunk.line))
