"""How long will a step take, as this engine has seen it so far?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from ridgeline.step import ScheduledRequest, StepPlan, StepPricer, StepShape

# Rows, and those of them without a guess; tokens of all and of the largest; the power of two that
# is above their mean context.
_Size = tuple[int, int, int, int, int]

MEMORY = 0.99  # weight of what was known, after each step: about a hundred steps count
LEAST_STEPS = 8  # before which the prices are taken as they are
SAME_CONTEXT = 8  # tokens: steps of guesses that differ by less have one price
SHORTEST = 8  # power of two, of tokens: below it prices are on one line
MAX_PRICES = 2048  # that are remembered
RIDGE = 0.01  # how much rather a wrong scale than a constant: equal steps cannot tell them apart


class RunStep(Protocol):
    """A step that has run: `seconds` on the device, after `host_s` in which it waited for the host
    with work pending. `ridgeline.observe.pricing.PricedStep` is one."""

    @property
    def plan(self) -> StepPlan: ...
    @property
    def seconds(self) -> float: ...
    @property
    def host_s(self) -> float: ...


@runtime_checkable
class DecodesPricer(Protocol):
    """A pricer that need not be shown a decode step row by row."""

    def decodes_seconds(self, contexts: tuple[int, ...]) -> float: ...


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


class LearnedPricer:
    """Prices corrected by this engine's own steps: seconds = scale * price + host_s.

    Both constants are a least squares fit over recent steps, each with weight 1 / (price * time):
    errors then count as shares of the step, and a single stall counts no more than any other step.
    """

    def __init__(self, pricer: StepPricer) -> None:
        self.pricer = pricer
        self._decodes = pricer.decodes_seconds if isinstance(pricer, DecodesPricer) else None
        self.scale = 1.0
        self.host_s = 0.0
        self.num_steps = 0
        self._checks = CheckPrices(
            lambda rows, context: (self.pricer.seconds(alike(rows, context)),)
        )
        # Decayed sums over steps of price p and time t: 1, p/t, 1/t, 1/p, 1/(p t)
        self._n = self._p_t = self._1_t = self._1_p = self._1_pt = 0.0

    def seconds(self, shape: StepShape) -> float:
        return self.scale * self.pricer.seconds(shape) + self.host_s

    def on_priced(self, step: RunStep) -> None:
        """A step has run. What the device waited for the host before it counts too."""
        took_s, price_s = step.seconds + step.host_s, self._price(step.plan)
        if took_s > 0 and price_s > 0:
            self._learn(price_s, took_s)

    def _price(self, plan: StepPlan) -> float:
        if plan.decodes is not None and self._decodes is not None:
            return self._decodes(plan.decodes.starts)
        if not any(row.num_draft for row in plan.scheduled):
            return self.pricer.seconds(plan.shape)
        return self._checks.of(plan.scheduled)[0]

    def _learn(self, p: float, t: float) -> None:
        self.num_steps += 1
        self._n = MEMORY * self._n + 1
        self._p_t = MEMORY * self._p_t + p / t
        self._1_t = MEMORY * self._1_t + 1 / t
        self._1_p = MEMORY * self._1_p + 1 / p
        self._1_pt = MEMORY * self._1_pt + 1 / (p * t)
        if self.num_steps >= LEAST_STEPS:
            self.scale, self.host_s = self._fit()

    def _fit(self) -> tuple[float, float]:
        """Where sum((scale*p + host_s - t)^2 / (p t)) is least, with both at least 0. RIDGE makes
        it prefer a scale where the steps do not tell."""
        one = (1 + RIDGE) * self._1_pt
        determinant = self._p_t * one - self._1_t**2  # above 0, by Cauchy and Schwarz
        scale = (self._n * one - self._1_p * self._1_t) / determinant
        host_s = (self._1_p * self._p_t - self._n * self._1_t) / determinant
        if host_s < 0:
            return self._n / self._p_t, 0.0
        if scale < 0:
            return 0.0, self._1_p / one
        return scale, host_s
