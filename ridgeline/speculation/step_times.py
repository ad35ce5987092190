"""What does a step that verifies k draft tokens of so many rows take, as this engine has seen it?

seconds = price * slowdown(rows) * ratio(rows, k). The speed of a host may double from one second to
the next, so every step moves the slowdown. A ratio moves only where one k follows another, when the
slowdown is about the same just before and after; the more often that was
compared, the less it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import exp, log
from statistics import median_low

from ridgeline.step import PricedStep

EXACT_ROWS = 8  # up to which each number of rows has times of its own
CONTEXT_LEVELS, SHORT = 4.0, 64  # levels of contexts for each factor e, above SHORT tokens
FIRST = 2  # steps of one k behind another whose lower time is compared with what was expected
WINDOW, SLOWDOWN_WEIGHT = (
    3,
    1 / 4,
)  # steps whose median moves the slowdown, by this weight: no stall does
LEAST_WEIGHT = 1 / 16  # of a comparison in a ratio, however many there were
# Times that a ratio may change at once, and one that is new or whose next comparison weighs more.
LIMIT, CLOSE, UNCERTAIN = 1.25, 2.0, 1 / 4
UNTRIED = 0.9  # of what is expected of a k that has not run lately: it may be the best
KNOWN_FOR = 512, 128  # steps that a ratio counts, doubled by each comparison; while drafting
STEADY = 16  # times as many rows as may come or go between two steps that count

# Of a step by its rows, their context and the draft tokens of each that it verifies.
StepSeconds = Callable[[int, int, int], float]
Sample = tuple[int, int, int, float]  # rows that share times, k, rows, measured over priced seconds


def row_bucket(num_rows: int) -> int:
    """The largest number of rows that has the times of this one: 1 .. 8, 12, 16, 24, 32, 48 ..."""
    if num_rows <= EXACT_ROWS:
        return num_rows
    power = 1 << (num_rows - 1).bit_length()
    return power * 3 // 4 if num_rows <= power * 3 // 4 else power


@dataclass(slots=True)
class _Ratio:
    value: float = 1.0
    num_compared: int = 0
    last: int = 0  # step with this k

    @property
    def weight(self) -> float:
        """Of the next comparison."""
        return max(LEAST_WEIGHT, 1 / (self.num_compared + 1))


@dataclass(slots=True)
class _Rows:
    """Of so many rows. `run`: measured over priced seconds of the last steps, `length` of them in
    a row with `k`; `before` these there were others."""

    slowdown: float = 1.0
    ratios: dict[int, _Ratio] = field(default_factory=dict)
    k: int = -1
    before: int = -1
    run: list[float] = field(default_factory=list)
    length: int = 0


class StepTimes:
    def __init__(self, prices: StepSeconds, choices: tuple[int, ...]) -> None:
        self.prices, self.num_steps = prices, 0
        self._choices = tuple(sorted({0, *choices}))
        self._overlaps = False
        self._last: tuple[Sample | None, Sample | None] = (None, None)
        self._priced: dict[tuple[int, int], dict[int, float]] = {}
        self._rows: dict[int, _Rows] = {}

    def seconds(self, num_rows: int, context: int) -> Mapping[int, float]:
        """Of steps of so many rows, by k. A k that has not run is taken to differ from its price as
        the nearest one that did, by seconds or by a factor, whichever is better for it."""
        bucket = row_bucket(num_rows)
        priced, seen = self._prices_of(bucket, context), self._rows.get(bucket) or _Rows()
        holds = KNOWN_FOR[seen.k > 0]
        known = {
            k: seen.slowdown * ratio.value
            for k, ratio in seen.ratios.items()
            if ratio.num_compared and self.num_steps - ratio.last < holds << ratio.num_compared
        }
        if not known:
            return priced
        found = {}
        for k, price in priced.items():
            near = _nearest(k, known)
            found[k] = price * known[near]
            if near != k:
                best = min(found[k], max(price / 2, price + priced[near] * (known[near] - 1)))
                found[k] = UNTRIED * (best if k else min(best, price))
        return found

    def on_priced(self, step: PricedStep) -> None:
        """A step that only decoded or verified counts, unless many rows have come or gone. Where
        steps overlap, it counts between two of its kind: the time between two results is the
        device's for one step and the host's for the next."""
        self.num_steps += 1
        self._overlaps |= step.is_overlapped
        before, last, this = (*self._last, self._sample(step))
        self._last = last, this
        if self._overlaps:
            if last is not None and _is_like(last, before) and _is_like(last, this):
                self._learn(*last)
        elif this is not None and (last is None or _is_steady(this, last)):
            self._learn(*this)

    def _sample(self, step: PricedStep) -> Sample | None:
        decodes, rows, k = step.plan.decodes, step.plan.scheduled, 0
        if decodes is not None:
            starts = decodes.starts
        else:
            if not rows or not all(r.samples and r.num_tokens == r.num_draft + 1 for r in rows):
                return None
            k, starts = max([row.num_draft for row in rows]), tuple([row.start for row in rows])
        num_rows, bucket = len(starts), row_bucket(len(starts))
        context = sum(starts) // num_rows
        took_s, price_s = step.seconds + step.host_s, self._prices_of(bucket, context).get(k, 0.0)
        return (bucket, k, num_rows, took_s / price_s) if min(took_s, price_s) > 0 else None

    def _learn(self, bucket: int, k: int, num_rows: int, value: float) -> None:
        seen = self._rows.setdefault(bucket, _Rows())
        ratio = seen.ratios.setdefault(k, _Ratio())
        ratio.last = self.num_steps
        if k != seen.k:
            seen.before, seen.k, seen.run, seen.length = seen.k, k, [], 0
        seen.run, seen.length = [*seen.run[1 - WINDOW :], value], seen.length + 1
        value = median_low(seen.run)
        if seen.length == FIRST:
            self._compare(seen, ratio, value)
        elif seen.length > FIRST:
            seen.slowdown *= (value / (seen.slowdown * ratio.value)) ** SLOWDOWN_WEIGHT

    def _compare(self, seen: _Rows, ratio: _Ratio, value: float) -> None:
        """With the slowdown that the k before has left: the difference is due to both ratios, more
        to the one that was compared less often, and the rest to the slowdown."""
        before = seen.ratios.get(seen.before)
        compared = {k: r.value for k, r in seen.ratios.items() if r.num_compared}
        if not compared:
            ratio.num_compared = 1
        elif not ratio.num_compared:
            near = compared[_nearest(seen.k, compared)]
            ratio.value, ratio.num_compared = near * _within(value / seen.slowdown / near, CLOSE), 1
        elif before is not None and before.num_compared:
            mine, other = ratio.weight, before.weight
            limit = CLOSE if max(mine, other) > UNCERTAIN else LIMIT
            change = _within(value / (seen.slowdown * ratio.value), limit)
            share = min(1.0, mine + other) / (mine + other)
            ratio.value *= change ** (share * mine)
            before.value /= change ** (share * other)
            ratio.num_compared += 1
            before.num_compared += 1
        seen.slowdown = value / ratio.value

    def _prices_of(self, bucket: int, context: int) -> dict[int, float]:
        level = 0 if context <= SHORT else round(log(context / SHORT) * CONTEXT_LEVELS)
        found = self._priced.get((bucket, level))
        if found is None:
            length = round(SHORT * exp(level / CONTEXT_LEVELS))
            found = {k: self.prices(bucket, length, k) for k in self._choices}
            self._priced[bucket, level] = found
        return found


def _is_steady(one: Sample, other: Sample) -> bool:
    return abs(one[2] - other[2]) * STEADY <= one[2]


def _is_like(one: Sample, other: Sample | None) -> bool:
    return other is not None and one[:2] == other[:2] and _is_steady(one, other)


def _nearest(k: int, known: Mapping[int, float]) -> int:
    return min(known, key=lambda other: abs(other - k))


def _within(factor: float, limit: float) -> float:
    return min(max(factor, 1 / limit), limit)
