"""Stop strings in text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Passes text on up to the first stop string, holding back what could still become one.

    A stop string that is complete ends the text where it begins. If one piece of text completes several, the one that
    begins earliest counts, and among those the longest. Cost per character does not depend on how much is held back
    (Knuth, Morris and Pratt 1977, doi:10.1137/0206024).

    Args:
        stops: non-empty strings.

    Attributes:
        stop: the stop string that was met; None until then.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stop: str | None = None
        self._stops = [(stop, _borders(stop)) for stop in dict.fromkeys(stops)]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str) -> str:
        """Take the next piece of text; return what is certain not to belong to a stop string."""
        if self.stop is not None:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        found: tuple[int, int, str] | None = None
        for index, (stop, borders) in enumerate(self._stops):
            matched = self._matched[index]
            if matched == 0 and stop[0] not in text:
                continue
            for place, character in enumerate(text, len(self._held)):
                while matched and stop[matched] != character:
                    matched = borders[matched - 1]
                if stop[matched] == character:
                    matched += 1
                if matched == len(stop):
                    candidate = (place + 1 - matched, -matched, stop)
                    found = candidate if found is None else min(found, candidate)
                    break
            self._matched[index] = matched
        if found is not None:
            self.stop = found[2]
            self._held = ""
            return held[: found[0]]
        certain = len(held) - max(self._matched)
        self._held = held[certain:]
        return held[:certain]

    def flush(self) -> str:
        """Return what was held back, no more text being expected."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[length] != stop[place]:
            length = borders[length - 1]
        if stop[length] == stop[place]:
            length += 1
        borders[place] = length
    return borders
