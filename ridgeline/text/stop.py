"""Where does a stop string end the text, and how much of the text is safe to show?

Text is searched character by character (Knuth, Morris and Pratt's automaton for each stop
string), so that the result does not depend on how the text was cut into tokens. The stop string
that is complete first wins; of two complete at the same character, the longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shown:
    """`text` may be shown now; `stop` is the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class _Pattern:
    """How many characters at the end of the text are the beginning of this stop string."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def take(self, char: str) -> bool:
        while self.matched and char != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += char == self.text[self.matched]
        return self.matched == len(self.text)


class StopFinder:
    """Finds stop strings in a text that comes in pieces; holds back what may be part of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(text) for text in dict.fromkeys(stops) if text]
        self._held = ""

    @property
    def is_empty(self) -> bool:
        """There is nothing to find."""
        return not self._patterns

    def feed(self, text: str) -> Shown:
        """What can be shown after `text`. Nothing may be fed once a stop string was found."""
        if not self._patterns or not text:
            return Shown(text)
        for i, char in enumerate(text):
            complete = [p for p in self._patterns if p.take(char)]
            if complete:
                stop = max((p.text for p in complete), key=len)
                seen = self._held + text[: i + 1]
                return Shown(seen[: len(seen) - len(stop)], stop)
        seen = self._held + text
        keep = max(p.matched for p in self._patterns)
        self._held = seen[len(seen) - keep :]
        return Shown(seen[: len(seen) - keep])

    def flush(self) -> str:
        """What was held back, now that no more text will come."""
        held, self._held = self._held, ""
        for pattern in self._patterns:
            pattern.matched = 0
        return held
