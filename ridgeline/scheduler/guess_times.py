"""What does a step take that checks so many guesses of so many rows, as this engine has seen it?

Prices of the cost model, corrected by the steps that have run, which are told apart by their rows
and guesses. The speed of a host may double from one second to the next, and steps with so many
guesses are seen only while they are chosen. So measured over priced seconds are the product of two
numbers: the pace of the machine with so many rows, which every step tells and which is followed at
once, and a ratio for each number of guesses, which is what a choice among them depends on. Ratios
are learned where one number follows another: the pace is about the same just before and after. What
it swings by meanwhile is as often too much as too little, so the more such places there were, the
less each one moves.

Where steps overlap, the time from one result to the next belongs to two of them: what the host did
for the later one, and what the device did for the earlier one. Then it counts only where both are
of one kind, the one before them too (behind others a draft has to catch up), and nothing was waited
for before them, as at the end of a request. Steps in which many requests end at once never count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median, median_low
from typing import Protocol

from ridgeline.request import record
from ridgeline.scheduler.policies.step_times import RunStep

EXACT_ROWS = 8  # up to which each number of rows is a bucket of its own
CONTEXT_STEPS = 4.0  # buckets of contexts for each factor e
BASE_CONTEXT = 64  # shorter ones cost the same
CORRECTED_AFTER = 16  # steps, once what is known of them has been taken in
LEARNED = 1 / 8  # of the last step in the pace
BEGINNING = 4  # steps of a kind, behind another, that are compared with what was expected
FEWEST = 2  # of them, where no more come
LEAST_LEARNED = 1 / 16  # of each comparison in a ratio, however many there were
LITTLE_KNOWN = 1 / 4  # weight of the next comparison above which one is so; where neither is,
LIMIT = 1.25  # times more or less at most is due to ratios: all else is a swing of the pace
FORGOTTEN_AFTER = 1024  # steps for each comparison, then it is tried anew; no more than
NEVER_AFTER = 4096
DOUBTED_AFTER = 64  # steps, and twice as many for each comparison there was
UNTRIED = 0.9  # of what is expected of steps that have not run yet, or whose ratio is in doubt
OUTLIER = 1.5  # times what is known: a stall, or a step that was captured as it ran
ODD_STEPS = 4  # of one kind in a row that are odd: no stalls
STEADY = 16  # times as many rows as may come or go between two steps that count
# Of what ratios of steps that check guesses differ by, as a power, where prices were measured on
# such a device: then both tell about as well which of two takes how much longer, until there were
# more comparisons than so many.
BELIEVED = 1 / 2
AS_GOOD_AS_PRICES = 4.0
CLOSE = 2.0  # times another ratio or part of it: prices of two kinds are not further off than that


class TimedStep(RunStep, Protocol):
    """`is_overlapped`: it was launched before the result of the step before it was there."""

    @property
    def is_overlapped(self) -> bool: ...


class GuessPrices(Protocol):
    """`ridgeline.cost.speculation.GuessPrices`."""

    def seconds(self, batch: int, context: int, num_drafts: int) -> float:
        """Of a step that checks so many guesses for each of `batch` rows, drafting included."""
        ...


def row_bucket(num_rows: int) -> int:
    """The largest number of rows that is priced like this one: 1 .. 8, 12, 16, 24, 32, 48 ..."""
    if num_rows <= EXACT_ROWS:
        return num_rows
    power = 1 << (num_rows - 1).bit_length()
    return power * 3 // 4 if num_rows <= power * 3 // 4 else power


@dataclass(slots=True)
class _Ratio:
    """Measured over priced seconds, over the pace. How often that was compared, and of all steps
    the last one of its kind."""

    value: float = 1.0
    num_compared: int = 0
    last: int = 0

    def is_known(self, num_steps: int) -> bool:
        """Lately enough, when so many steps have run."""
        holds = min(NEVER_AFTER, FORGOTTEN_AFTER * self.num_compared)
        return num_steps - self.last < holds

    def is_doubted(self, num_steps: int) -> bool:
        """Compared so seldom, and so long ago, that it may have been a swing of the pace."""
        return num_steps - self.last >= DOUBTED_AFTER << self.num_compared

    @property
    def belief(self) -> float:
        """In it, beside a price that was measured."""
        return max(BELIEVED, self.num_compared / (self.num_compared + AS_GOOD_AS_PRICES))

    @property
    def weight(self) -> float:
        """Of the next comparison."""
        return max(LEAST_LEARNED, 1 / (self.num_compared + 1))


@dataclass(slots=True)
class _Bucket:
    """What is known of steps of so many rows, by their guesses. `beginning`: the first steps of a
    kind behind those of kind `before`, until they are compared; `odd`: the last ones in a row that
    were far from what was expected; `num_changes` of ratios there have been."""

    pace: float = 1.0
    ratios: dict[int, _Ratio] = field(default_factory=dict)
    kind: int = -1  # guesses of the last step that was learned from
    before: int = -1
    beginning: list[float] | None = None
    odd: list[float] = field(default_factory=list)
    num_changes: int = 0


@record
class _Sample:
    """One step; `value`: measured over priced seconds."""

    bucket: int
    num_guesses: int
    num_rows: int
    value: float

    def is_like(self, other: _Sample | None) -> bool:
        if other is None:
            return False
        return self.bucket == other.bucket and self.num_guesses == other.num_guesses

    def is_steady(self, other: _Sample | None) -> bool:
        """Not many have come or gone between the two."""
        return other is None or abs(self.num_rows - other.num_rows) * STEADY <= self.num_rows


@dataclass(slots=True)
class StepTimes:
    """Prices of steps that decode or check, corrected by those that have run, which are told apart
    by their number of rows and of guesses."""

    prices: GuessPrices
    choices: tuple[int, ...]
    is_measured: bool = False  # prices are those of such a device
    num_steps: int = 0
    _overlaps: bool = False  # steps of this engine do
    _pending: _Sample | None = None  # of the last step, until it is known what ran beside it
    _last: _Sample | None = None  # the last step, if it only checked or decoded
    _priced: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)
    _buckets: dict[int, _Bucket] = field(default_factory=dict)
    # By rows and context: corrected prices, until which step they hold, and of which ratios
    _corrected_ones: dict[tuple[int, int], tuple[dict[int, float], int, int]] = field(
        default_factory=dict
    )

    def seconds(self, bucket: int, context: int) -> dict[int, float]:
        """Of steps of so many rows, by the number of guesses. The same object while nothing much
        has been learned."""
        key = (bucket, _context_bucket(context))
        found, until, num_changes = self._corrected_ones.get(key, ({}, -1, 0))
        seen = self._buckets.get(bucket) or _Bucket()
        if self.num_steps < until and num_changes == seen.num_changes:
            return found
        known = self._corrections(seen)
        found = priced = self._prices_of(*key)
        if known:
            found = {k: _corrected(k, priced, known) for k in priced}
        self._corrected_ones[key] = found, self.num_steps + CORRECTED_AFTER, seen.num_changes
        return found

    def _corrections(self, seen: _Bucket) -> dict[int, float]:
        """Measured over priced seconds, as far as it is believed, by the number of guesses. While
        some are checked, other numbers that are in doubt are taken to be a little cheaper, so that
        those which may be the best are compared again."""
        ratios = self._known(seen)
        known = {k: ratio.value for k, ratio in ratios.items()}
        checks = [k for k in known if k]
        if self.is_measured and checks:
            middle = known[seen.kind] if seen.kind in checks else _mean([known[k] for k in checks])
            known |= {k: middle * (known[k] / middle) ** ratios[k].belief for k in checks}
        if seen.kind > 0:
            doubted = [k for k in checks if ratios[k].is_doubted(self.num_steps)]
            known |= {k: UNTRIED * known[k] for k in doubted}
        return {k: seen.pace * ratio for k, ratio in known.items()}

    def correction(self, num_rows: int, num_guesses: int) -> float | None:
        """Measured over priced seconds of such steps; None where none has run."""
        seen = self._buckets.get(row_bucket(num_rows)) or _Bucket()
        ratio = seen.ratios.get(num_guesses)
        return seen.pace * ratio.value if ratio is not None and ratio.num_compared else None

    def has_learned(self, bucket: int, num_guesses: int) -> bool:
        """Steps with so many guesses are what ran last, and were compared with those before."""
        seen = self._buckets.get(bucket)
        return seen is not None and seen.kind == num_guesses and seen.beginning is None

    def on_priced(self, step: TimedStep) -> None:
        """A step has run. If it only checked guesses, or only decoded, its time is learned: with
        the next one, which may have overlapped with it."""
        self.num_steps += 1
        is_beside = step.is_overlapped
        if is_beside and not self._overlaps:
            self._overlaps, self._pending = True, None
        pending, last, sample = self._pending, self._last, self._sample(step)
        self._last, self._pending = sample, None
        is_steady = sample is not None and sample.is_steady(last)
        if not self._overlaps:
            if is_steady:
                self._pending = sample
            if pending is not None:
                self._learn(pending)
        elif sample is not None and is_beside and is_steady and sample.is_like(last):
            self._pending = sample
            if pending is not None:
                self._learn(pending)

    def _sample(self, step: TimedStep) -> _Sample | None:
        decodes, rows = step.plan.decodes, step.plan.scheduled
        if decodes is not None:
            num_guesses, starts = 0, decodes.starts
        else:
            for entry in rows:
                if not entry.samples or entry.num_tokens != entry.num_draft + 1:
                    return None
            if not rows:
                return None
            num_guesses, starts = max([e.num_draft for e in rows]), tuple([e.start for e in rows])
        took_s = step.seconds + step.host_s
        bucket = row_bucket(len(starts))
        priced = self._prices_of(bucket, _context_bucket(sum(starts) // len(starts)))
        price_s = priced.get(num_guesses, 0.0)
        if took_s <= 0 or price_s <= 0:
            return None
        return _Sample(bucket, num_guesses, len(starts), took_s / price_s)

    def _learn(self, sample: _Sample) -> None:
        """The first of all is left out: it may have been captured, or compiled for."""
        num_guesses, value = sample.num_guesses, sample.value
        seen = self._buckets.setdefault(sample.bucket, _Bucket())
        ratio = seen.ratios.get(num_guesses)
        if ratio is None:
            seen.ratios[num_guesses] = _Ratio(last=self.num_steps)
            return
        is_known = ratio.is_known(self.num_steps)
        ratio.last = self.num_steps
        if num_guesses != seen.kind:
            self._begin(seen, num_guesses)
        elif not is_known and seen.beginning is None:
            seen.before, seen.beginning = -1, []
        if seen.beginning is not None:
            seen.beginning.append(value)
            if len(seen.beginning) >= (BEGINNING if is_known else FEWEST):
                self._compare(seen, is_known=is_known)
            return
        off = value / (seen.pace * ratio.value)
        if 1 / OUTLIER <= off <= OUTLIER:
            seen.odd = []
            seen.pace *= off**LEARNED
            return
        seen.odd.append(value)
        if len(seen.odd) >= ODD_STEPS:
            seen.pace, seen.odd = median(seen.odd) / ratio.value, []

    def _begin(self, seen: _Bucket, num_guesses: int) -> None:
        """Steps of another kind than the last one."""
        if seen.beginning is not None and len(seen.beginning) >= FEWEST:
            self._compare(seen, is_known=True)
        seen.before, seen.kind, seen.beginning, seen.odd = seen.kind, num_guesses, [], []

    def _compare(self, seen: _Bucket, *, is_known: bool) -> None:
        """The pace is as steps of the kind before have left it: what these took more or less is
        due to both ratios, the more to one the less is known of it, and to the pace."""
        value, ratio = median_low(seen.beginning or ()), seen.ratios[seen.kind]
        before = seen.ratios.get(seen.before)
        known = self._known(seen)
        seen.beginning = None
        seen.num_changes += 1
        if not is_known:
            known.pop(seen.kind, None)
            ratio.num_compared, ratio.value = 1, 1.0
            if known:
                near = known[min(known, key=lambda k: abs(k - seen.kind))].value
                ratio.value = min(max(value / seen.pace, near / CLOSE), near * CLOSE)
        elif before is not None and seen.before in known:
            mine, other = ratio.weight, before.weight
            limit = CLOSE if max(mine, other) > LITTLE_KNOWN else LIMIT
            change = min(max(value / (seen.pace * ratio.value), 1 / limit), limit)
            moves = min(1.0, mine + other) / (mine + other)
            ratio.value *= change ** (moves * mine)
            before.value /= change ** (moves * other)
            ratio.num_compared += 1
            before.num_compared += 1
        seen.pace = value / ratio.value

    def _known(self, seen: _Bucket) -> dict[int, _Ratio]:
        return {k: r for k, r in seen.ratios.items() if r.is_known(self.num_steps)}

    def _prices_of(self, bucket: int, context: int) -> dict[int, float]:
        key = (bucket, context)
        found = self._priced.get(key)
        if found is None:
            length = round(BASE_CONTEXT * 2.718281828 ** (context / CONTEXT_STEPS))
            prices = self.prices
            found = {k: prices.seconds(bucket, length, k) for k in self.choices}
            found.setdefault(0, prices.seconds(bucket, length, 0))
            self._priced[key] = found
        return found


def _mean(ratios: Sequence[float]) -> float:
    """Of factors."""
    return exp(sum(map(log, ratios)) / len(ratios))


def _context_bucket(context: int) -> int:
    return 0 if context <= BASE_CONTEXT else round(log(context / BASE_CONTEXT) * CONTEXT_STEPS)


def _corrected(k: int, priced: Mapping[int, float], known: Mapping[int, float]) -> float:
    """By what is known of measured over priced seconds. Steps that have not run yet are taken to
    differ from their price as the nearest that did, by the same seconds or the same factor,
    whichever is better for them, and a little more, so that they are tried where they may be the
    best; and steps without guesses, which all others must beat, to be no dearer than their price.
    """
    near = min(known, key=lambda other: abs(other - k))
    ratio = known[near]
    if near == k:
        return priced[k] * ratio
    best = min(priced[k] * ratio, max(priced[k] / 2, priced[k] + priced[near] * (ratio - 1)))
    return UNTRIED * (best if k else min(best, priced[0]))
