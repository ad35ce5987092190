"""How likely is a guess right: of one request, as it went lately, and of all together?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ridgeline.formats import MAX_GUESSES

MEMORY = 29 / 30  # of a row: about 30 guesses count
# Of all rows together: about a thousand rows of steps, and at least about 128 steps however many
# rows each has. Less would be the last answers alone: of rows that begin together, how answers end
# when the next ones begin.
SHARED_MEMORY = 0.999
STEPS_MEMORY = 127 / 128
# The same of what is looked up, where the next one may copy as none has before: 200 rows, 16 steps.
LOOKED_UP_MEMORY = 0.995
LOOKED_UP_STEPS = 15 / 16
PRIOR_WEIGHT = 20.0  # guesses that what is known of all rows counts for in one
# The same of what is looked up, where a row copies or does not: others say little of it.
LOOKED_UP_WEIGHT = 4.0
BREAK = 0.4  # between what was right lately and before: then only the former counts
LATELY = 7 / 8  # about 8 guesses
FOUND_MEMORY = 15 / 16  # of a row's steps, after one kind each: about 16
SHARED_FOUND = 0.995  # of all rows together: about 200
FOUND_WEIGHT = 3.0  # steps that what is known of all rows counts for in one
HOPELESS = 0.04  # acceptance below which a row's guesses are not worth their blocks
ENOUGH = 20.0  # guesses of a row that say so
FEW = 24.0  # guesses at one position that are too few to tell it from the others
BEGINS_AFTER = 2  # steps in which something was right, where nothing was before: a copy
ENDS_AFTER = 6  # steps in which nothing is any more; fewer are how the next answer begins
SETTLED_AFTER = 16  # steps since then: what they bring has been learned
HEAVY = 1e30  # weight of a guess from which on sums are made lighter
# Of what was known, by the number of guesses that are added to it: of all and of the latest.
_KEPT = tuple((MEMORY**looked, LATELY**looked) for looked in range(MAX_GUESSES + 2))


@dataclass(slots=True)
class FoundShare:
    """How often was there something to look at, after a step in which there was, and after one in
    which there was not? Copies come in runs. By that: steps, and those with something, older ones
    counting less."""

    num_steps: list[float] = field(default_factory=lambda: [0.0, 0.0])
    num_found: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, before: bool, now: bool, memory: float) -> None:
        self.num_steps[before] = self.num_steps[before] * memory + 1
        self.num_found[before] = self.num_found[before] * memory + now

    def share(self, before: bool, prior: float, weight: float) -> float:
        """`prior` counts for `weight` steps."""
        return (self.num_found[before] + prior * weight) / (self.num_steps[before] + weight)


@dataclass(slots=True)
class RowAcceptance:
    """Of one request: guesses looked at and right ones, older ones counting less, and how often
    there was any."""

    looked: float = 0.0
    right: float = 0.0
    found: FoundShare = field(default_factory=FoundShare)
    had_some: bool | None = None  # something to look at, the last time
    lately: float = -1.0  # share of right ones; below 0: nothing is known

    @property
    def is_hopeless(self) -> bool:
        return self.looked > ENOUGH and self.right < HOPELESS * self.looked

    def rate(self, prior: float, weight: float = PRIOR_WEIGHT) -> float:
        """`prior`, of all rows, counts for `weight` guesses."""
        return (self.right + weight * prior) / (self.looked + weight)

    def add(self, looked: int, right: int) -> None:
        """So many were looked at, all of them right but perhaps the last."""
        kept, recent = _KEPT[looked]
        self.looked = self.looked * kept + looked
        self.right = self.right * kept + right
        if self.lately < 0:
            self.lately = right / looked
            return
        self.lately = self.lately * recent + (1 - recent) * right / looked
        if abs(self.right - self.lately * self.looked) > BREAK * self.looked:
            self.looked = min(self.looked, 1 / (1 - LATELY))
            self.right = self.lately * self.looked


@dataclass(slots=True)
class CopyRuns:
    """Do answers copy? That is so for a while, or not."""

    is_copying: bool = False
    num_others: int = 0  # the last steps, in which it was otherwise
    num_steps: int = 0  # since that changed

    def add(self, is_right: bool) -> bool:
        """A step in which something was right of what was looked up, or nothing. Has a copy begun,
        or ended?"""
        self.num_steps += 1
        self.num_others = 0 if is_right == self.is_copying else self.num_others + 1
        if self.num_others < (ENDS_AFTER if self.is_copying else BEGINS_AFTER):
            return False
        self.is_copying, self.num_others, self.num_steps = is_right, 0, 0
        return True

    @property
    def is_settled(self) -> bool:
        return self.num_steps >= SETTLED_AFTER


class SharedAcceptance:
    """Of all rows together: how often a guess is right, and at which positions more or less."""

    def __init__(self, prior: float, max_guesses: int, *, is_looked_up: bool = False) -> None:
        self._memory = LOOKED_UP_MEMORY if is_looked_up else SHARED_MEMORY
        self._steps_memory = LOOKED_UP_STEPS if is_looked_up else STEPS_MEMORY
        # Sums in which older guesses count less: not these fade, but what is added weighs more.
        self._weight = 1.0  # of the newest guess
        self._looked, self._right = PRIOR_WEIGHT, PRIOR_WEIGHT * prior
        self._at = [[0.0, 0.0] for _ in range(max_guesses)]  # looked at and right, by position
        self._num_added = 0
        self._shape = [1.0] * max_guesses
        self.rate = prior
        self._found = FoundShare()

    def add_step(self, results: Iterable[tuple[int, int, int]]) -> None:
        """Of one step: so many guesses were looked at, all right but perhaps the last, of so many
        rows each. In whatever order they come: what is known fades once for all of them."""
        told = tuple(results)
        num_rows = sum([count for _, _, count in told])
        if not num_rows:
            return
        self._weight /= max(self._memory**num_rows, self._steps_memory)
        if self._weight > HEAVY:
            self._lighten()
        for looked, right, count in told:
            weight = count * self._weight
            self._looked += looked * weight
            self._right += right * weight
            for position, seen in enumerate(self._at[:looked]):
                seen[0] += weight
                if position < right:
                    seen[1] += weight
        self.rate = self._right / self._looked
        self._num_added += 1

    def _lighten(self) -> None:
        """All sums in the weight of the newest guess."""
        weight, self._weight = self._weight, 1.0
        self._looked /= weight
        self._right /= weight
        self._at = [[looked / weight, right / weight] for looked, right in self._at]

    def add_found(self, row: RowAcceptance, is_some: bool) -> None:
        """One step of a row: was there something to look at?"""
        if (before := row.had_some) is not None:
            row.found.add(before, is_some, FOUND_MEMORY)
            self._found.add(before, is_some, SHARED_FOUND)
        row.had_some = is_some

    def found(self, row: RowAcceptance | None, before: bool) -> float:
        """How likely is there something to look at? `before`: in the last step there was."""
        shared = self._found.share(before, 1.0, 1.0)
        return shared if row is None else row.found.share(before, shared, FOUND_WEIGHT)

    def shape(self) -> list[float]:
        """By position, how many times as likely as usual a guess is right that is reached. Where
        too few were seen, as at the position before."""
        if self._num_added:
            self._num_added = 0
            self._shape, last, few = [], 1.0, FEW * self._weight
            for looked, right in self._at:
                if looked >= few and self.rate > 0:
                    last = right / looked / self.rate
                self._shape.append(last)
        return self._shape

    def by_position(self) -> tuple[float | None, ...]:
        """The chance of a guess that is reached, by position; None where too few were seen."""
        few = FEW * self._weight
        return tuple(right / looked if looked >= few else None for looked, right in self._at)
