"""Stop strings in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class _Beginnings:
    """The beginnings of all stop strings as one automaton (Aho and Corasick 1975, doi:10.1145/360825.360855).

    Beginning 0 is the empty one.

    Args:
        stops: non-empty strings.

    Attributes:
        longer: by beginning, those of one character more, by that character.
        shorter: by beginning, the longest other one that it ends with.
        stop_chars: by beginning, the length of the longest stop string that it ends with; 0 if there is none.
        chars: by beginning, its length.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.longer: list[dict[str, int]] = [{}]
        self.shorter = [0]
        self.stop_chars = [0]
        self.chars = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def after(self, beginning: int, character: str) -> int:
        """The longest beginning that text ends with which ended with `beginning` before `character`."""
        while beginning and character not in self.longer[beginning]:
            beginning = self.shorter[beginning]
        return self.longer[beginning].get(character, 0)

    def _add(self, stop: str) -> None:
        beginning = 0
        for character in stop:
            known = self.longer[beginning].setdefault(character, len(self.chars))
            if known == len(self.chars):
                self.longer.append({})
                self.shorter.append(0)
                self.stop_chars.append(0)
                self.chars.append(self.chars[beginning] + 1)
            beginning = known
        self.stop_chars[beginning] = len(stop)

    def _link(self) -> None:
        reached = [0]
        for beginning in reached:  # by length: what a beginning falls back to is linked before it
            for character, longer in self.longer[beginning].items():
                if beginning:
                    self.shorter[longer] = self.after(self.shorter[beginning], character)
                self.stop_chars[longer] = self.stop_chars[longer] or self.stop_chars[self.shorter[longer]]
                reached.append(longer)


class StopScanner:
    """Passes text on up to the first stop string, holding back what could still become one.

    A stop string that is complete ends the text where it begins. If one piece of text completes several, the one that
    begins earliest counts, and among those the longest. The cost per character depends neither on how many stop
    strings there are nor on how much is held back.

    Args:
        stops: non-empty strings.

    Attributes:
        stop: the stop string that was met; None until then.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stop: str | None = None
        self._beginnings = _Beginnings(stops)
        self._openings = frozenset(self._beginnings.longer[0])
        self._held = ""
        self._beginning = 0  # `_held`, which is the longest one that the text so far ends with

    def feed(self, text: str) -> str:
        """Take the next piece of text; return what is certain not to belong to a stop string."""
        if self.stop is not None:
            return ""
        if not self._held and self._openings.isdisjoint(text):
            return text
        held = self._held + text
        found: tuple[int, int] | None = None
        for place, character in enumerate(text, len(self._held)):
            self._beginning = self._beginnings.after(self._beginning, character)
            length = self._beginnings.stop_chars[self._beginning]
            if length:
                candidate = (place + 1 - length, -length)
                found = candidate if found is None else min(found, candidate)
        if found is not None:
            start, length = found[0], -found[1]
            self.stop = held[start : start + length]
            self._held = ""
            return held[:start]
        certain = len(held) - self._beginnings.chars[self._beginning]
        self._held = held[certain:]
        return held[:certain]

    def flush(self) -> str:
        """Return what was held back, no more text being expected."""
        held, self._held = self._held, ""
        self._beginning = 0
        return held
