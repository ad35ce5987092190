"""What will a step cost in which guesses are checked, without pricing each one anew?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ridgeline.step import ScheduledRequest, StepShape

# Rows, and those of them without a guess; tokens of all and of the largest; the power of two that
# is above their mean context.
_Size = tuple[int, int, int, int, int]

SAME_CONTEXT = 8  # tokens: steps whose mean contexts differ by less have one price
SHORTEST = 8  # power of two, of tokens: below it prices are on one line
MAX_PRICES = 2048  # that are remembered


class CheckPrices:
    """Prices of steps in which each row computes its newest token and guesses. To price one takes
    as long as to plan it, and contexts of many rows grow out of step, so that hardly one is like
    another. But they are on a line over the rows' mean context, nearly: it is priced at two powers
    of two, with all rows alike. `price`: numbers of a step with so many new tokens of each row,
    whose guesses these are, behind so many tokens."""

    def __init__(
        self, price: Callable[[Sequence[ScheduledRequest], int], tuple[float, ...]]
    ) -> None:
        self._price = price
        self._lines: dict[_Size, tuple[tuple[float, ...], tuple[float, ...]]] = {}
        self._known: dict[tuple[_Size, int], tuple[float, ...]] = {}

    def of(self, rows: Sequence[ScheduledRequest]) -> tuple[float, ...]:
        """Of a step with these. The same object while their mean context is about the same."""
        num_new = [row.num_tokens for row in rows]
        mean = sum([row.start for row in rows]) // len(rows)
        octave = max(SHORTEST, mean.bit_length())
        size = len(rows), num_new.count(1), sum(num_new), max(num_new), octave
        key = size, mean // SAME_CONTEXT
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_PRICES:
                self._known.clear()
            found = self._known[key] = self._on_line(rows, size, mean)
        return found

    def _on_line(
        self, rows: Sequence[ScheduledRequest], size: _Size, mean: int
    ) -> tuple[float, ...]:
        high = 1 << size[-1]
        low = 1 if size[-1] == SHORTEST else high // 2  # behind nothing it would be a prompt
        line = self._lines.get(size)
        if line is None:
            if len(self._lines) >= MAX_PRICES:
                self._lines.clear()
            line = self._lines[size] = self._price(rows, low), self._price(rows, high)
        share = (mean - low) / (high - low)
        return tuple([a + share * (b - a) for a, b in zip(*line, strict=True)])


def alike(rows: Sequence[ScheduledRequest], context: int) -> StepShape:
    """As many new tokens of each row, all behind so many."""
    return tuple([(row.num_tokens, context) for row in rows])
