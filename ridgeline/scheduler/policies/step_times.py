"""How long will a step take, as this engine has seen it so far?"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ridgeline.step import Listener, PricedStep, StepPlan, StepPricer, StepShape

MEMORY = 0.99  # weight of what was known, after each step: about a hundred steps count
LEAST_STEPS = 8  # before which the prices are taken as they are
RIDGE = 0.01  # how much rather a wrong scale than a constant: equal steps cannot tell them apart


@runtime_checkable
class DecodesPricer(Protocol):
    """A pricer that need not be shown a decode step row by row."""

    def decodes_seconds(self, contexts: tuple[int, ...]) -> float: ...


class LearnedPricer(Listener):
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
        # Decayed sums over steps of price p and time t: 1, p/t, 1/t, 1/p, 1/(p t)
        self._n = self._p_t = self._1_t = self._1_p = self._1_pt = 0.0

    def seconds(self, shape: StepShape) -> float:
        return self.scale * self.pricer.seconds(shape) + self.host_s

    def on_priced(self, step: PricedStep) -> None:
        """A step has run. What the device waited for the host before it counts too."""
        took_s, price_s = step.seconds + step.host_s, self._price(step.plan)
        if took_s > 0 and price_s > 0:
            self._learn(price_s, took_s)

    def _price(self, plan: StepPlan) -> float:
        if plan.decodes is not None and self._decodes is not None:
            return self._decodes(plan.decodes.starts)
        return self.pricer.seconds(plan.shape)

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
