"""What does a step take that checks so many guesses of so many rows, as this engine has seen it?

Prices of the cost model, corrected by the steps that have run, which are told apart by their rows
and guesses. Where steps overlap, the time from one result to the next belongs to two of them: what
the host did for the later one, and what the device did for the earlier one. Then it counts only
where both are of one kind and nothing was waited for before them, as at the end of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Protocol

from ridgeline.scheduler.policies.step_times import RunStep

EXACT_ROWS = 8  # up to which each number of rows is a bucket of its own
CONTEXT_STEPS = 4.0  # buckets of contexts for each factor e
BASE_CONTEXT = 64  # shorter ones cost the same
CORRECTED_AFTER = 16  # steps, once what is known of them has been taken in
LEARNED = 1 / 8  # of the last step in what is known of its like
FORGOTTEN_AFTER = 4096  # steps: then it is tried anew
UNTRIED = 0.9  # of what is expected of steps that have not run yet
OUTLIER = 1.5  # times what is known: a stall, or a step that was captured as it ran
SETTLED_AFTER = 32  # steps of its own: then it is known well
# Steps: then it is taken to have become slower or faster as those that run have.
RESTED_AFTER = 8


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
    """Measured over priced seconds."""

    value: float = 1.0
    num_steps: int = 0
    last: int = 0
    num_odd: int = 0  # samples in a row that were far away


Sample = tuple[int, int, float]  # bucket of rows, guesses, measured over priced seconds


@dataclass(slots=True)
class StepTimes:
    """Prices of steps that decode or check, corrected by those that have run, which are told apart
    by their number of rows and of guesses."""

    prices: GuessPrices
    choices: tuple[int, ...]
    num_steps: int = 0
    _overlaps: bool = False  # steps of this engine do
    _pending: Sample | None = None  # of the last step, until it is known what ran beside it
    _priced: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)
    _ratios: dict[int, dict[int, _Ratio]] = field(default_factory=dict)
    # By rows and context: corrected prices, until which step they hold, and of how many ratios
    _corrected_ones: dict[tuple[int, int], tuple[dict[int, float], int, int]] = field(
        default_factory=dict
    )

    def seconds(self, bucket: int, context: int) -> dict[int, float]:
        """Of steps of so many rows, by the number of guesses. The same object while nothing much
        has been learned."""
        key = (bucket, _context_bucket(context))
        found, until, num_known = self._corrected_ones.get(key, ({}, -1, 0))
        ratios = self._ratios.get(bucket, {})
        if self.num_steps < until and num_known == len(ratios):
            return found
        known = [k for k, r in ratios.items() if self._counts(r)]
        found = priced = self._prices_of(*key)
        if known:
            found = {k: self._corrected(k, priced, ratios, known) for k in priced}
        until = self.num_steps + CORRECTED_AFTER if len(known) == len(ratios) else 0
        self._corrected_ones[key] = (found, until, len(ratios))
        return found

    def _corrected(
        self,
        k: int,
        priced: Mapping[int, float],
        ratios: Mapping[int, _Ratio],
        known: Sequence[int],
    ) -> float:
        """Steps that have not run yet are taken to differ from their price as the nearest that did,
        by the same seconds or the same factor, whichever is better for them, and a little more, so
        that they are tried where they may be the best; and steps without guesses, which all others
        must beat, to be no dearer than their price."""
        near = min(known, key=lambda other: abs(other - k))
        ratio = ratios[near].value
        if near == k:
            return priced[k] * ratio
        best = min(priced[k] * ratio, max(priced[k] / 2, priced[k] + priced[near] * (ratio - 1)))
        return UNTRIED * (best if k else min(best, priced[0]))

    def correction(self, num_rows: int, num_guesses: int) -> float | None:
        """Measured over priced seconds of such steps; None where none has run."""
        ratio = self._ratios.get(row_bucket(num_rows), {}).get(num_guesses)
        return ratio.value if ratio is not None and ratio.num_steps else None

    def on_priced(self, step: TimedStep) -> None:
        """A step has run. If it only checked guesses, or only decoded, its time is learned: with
        the next one, which may have overlapped with it."""
        self.num_steps += 1
        is_beside = step.is_overlapped
        if is_beside and not self._overlaps:
            self._overlaps, self._pending = True, None
        last, sample = self._pending, self._sample(step)
        self._pending = sample if is_beside or not self._overlaps else None
        if last is None:
            return
        if not self._overlaps or (is_beside and sample is not None and sample[:2] == last[:2]):
            self._learn(*last)

    def _sample(self, step: TimedStep) -> Sample | None:
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
        return (bucket, num_guesses, took_s / price_s) if took_s > 0 and price_s > 0 else None

    def _learn(self, bucket: int, num_guesses: int, value: float) -> None:
        """The first is left out: it may have been captured, or compiled for. One that is far from
        the others counts only if the next ones are as far; if what is known well is far from what
        it was, it is the machine that has become slower or faster, and all steps with it."""
        ratios = self._ratios.setdefault(bucket, {})
        ratio = ratios.get(num_guesses)
        if ratio is None:
            ratio = ratios[num_guesses] = _Ratio()
        is_known, was_settled = self._counts(ratio), ratio.num_steps > SETTLED_AFTER
        ratio.last = self.num_steps
        ratio.num_steps = ratio.num_steps + 1 if is_known or ratio.num_steps == 0 else 2
        if ratio.num_steps == 1:
            return
        if not is_known:
            ratio.value, ratio.num_odd = value, 0
            return
        before = ratio.value
        is_odd, has_jumped = not before / OUTLIER <= value <= before * OUTLIER, False
        ratio.num_odd = ratio.num_odd + 1 if is_odd else 0
        if not is_odd:
            ratio.value += max(LEARNED, 1 / (ratio.num_steps - 1)) * (value - before)
        elif ratio.num_odd > 2:
            ratio.value, ratio.num_odd, has_jumped = value, 0, True
            if not was_settled:  # else it stays so: the way back tells of the others as well
                ratio.num_steps = 2
        else:
            return
        if not was_settled:  # how it settles says nothing of the others
            return
        change = ratio.value / before
        for other in ratios.values():
            has_rested = self.num_steps - other.last > RESTED_AFTER
            if other is not ratio and (has_jumped or has_rested):
                other.value *= change

    def _counts(self, ratio: _Ratio) -> bool:
        return ratio.num_steps > 1 and self.num_steps - ratio.last < FORGOTTEN_AFTER

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


def _context_bucket(context: int) -> int:
    return 0 if context <= BASE_CONTEXT else round(log(context / BASE_CONTEXT) * CONTEXT_STEPS)
