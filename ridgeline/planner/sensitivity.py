"""What would have to be different for another answer? Each found with the closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

from ridgeline.figures import number
from ridgeline.planner.estimate import Estimate, Priced, quick_estimate, under, with_promise
from ridgeline.planner.question import GRID, Grid, Hardware, Question
from ridgeline.planner.search import Deployment, best_of_each, in_order

RATES = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 1.75, 2, 3, 4, 6, 10)
TIMES = (0.25, 0.5, 0.75, 1.5, 2.0, 4.0)  # of a promise
NEAR = 1.02  # times: so close a change is found between two that were tried


@dataclass(frozen=True, slots=True)
class BreakEven:
    """`what` (a price, the rate, a promise) would lead to `answer` at `at` instead of `now`."""

    what: str
    now: float
    at: float
    unit: str
    answer: str

    @property
    def text(self) -> str:
        side = "below" if self.at < self.now else "above"
        return (
            f"{self.what} {side} {number(self.at)} {self.unit} (now {number(self.now)}): "
            f"{self.answer} would be the answer"
        )


def sensitivity_of(
    question: Question, winner: Deployment, estimates: Sequence[Estimate], grid: Grid = GRID
) -> tuple[BreakEven, ...]:
    """The nearest changes of price, rate and promises that another hardware would win by."""
    found = [
        *price_sensitivity(question, winner, estimates),
        *rate_sensitivity(question, winner, estimates),
    ]
    priced = {estimate.hardware: estimate.priced for estimate in estimates}
    found += promise_sensitivity(question, winner, tuple(priced.values()), grid)
    return tuple(found)


def price_sensitivity(
    question: Question, winner: Deployment, estimates: Iterable[Estimate]
) -> list[BreakEven]:
    """At which price of its device the next best would be as cheap; and that of the winner's."""
    own, found = winner.estimate.hardware, []
    for rival in best_of_each(estimates, question.rate):
        device, price = rival.hardware.device, rival.hardware.offer.per_hour
        if device == own.device or price is None:
            continue
        count = rival.replicas(question.rate) * rival.hardware.layout.devices
        found.append(
            BreakEven(
                f"price of {device.name}", price, winner.cost / count, "$/h", rival.hardware.text
            )
        )
        if (now := own.offer.per_hour) is not None:
            at = count * price / winner.num_devices
            what = f"price of {own.device.name}"
            found.append(BreakEven(what, now, at, "$/h", rival.hardware.text))
        break
    return [change for change in found if change.at != change.now]


def rate_sensitivity(
    question: Question, winner: Deployment, estimates: Sequence[Estimate]
) -> list[BreakEven]:
    """The nearest lower and higher rate at which another hardware is cheaper."""
    own, found = winner.estimate.hardware, []
    each = list(best_of_each(estimates, question.rate))
    first = in_order(each, question.rate)[0].hardware

    def other(factor: float) -> str | None:
        best = in_order(estimates, factor * question.rate)[0].hardware
        return None if best in (own, first) else best.text

    for factors in _both_ways(RATES):
        if (change := nearest(factors, other)) is not None:
            rate = change[0] * question.rate
            found.append(BreakEven("rate", question.rate, rate, "requests/s", change[1]))
    return found


def _both_ways(factors: Sequence[float]) -> tuple[list[float], list[float]]:
    """Those below 1 and those above, the nearest first."""
    return sorted((f for f in factors if f < 1), reverse=True), [f for f in factors if f > 1]


def nearest(
    factors: Sequence[float], other: Callable[[float], str | None]
) -> tuple[float, str] | None:
    """The first of `factors`, which lead away from 1, with another answer, then the change between
    it and the one before, nearer and nearer; and that answer."""
    before = 1.0
    for factor in factors:
        answer = other(factor)
        if answer is None:
            before = factor
            continue
        while max(before / factor, factor / before) > NEAR:
            middle = sqrt(before * factor)
            closer = other(middle)
            if closer is None:
                before = middle
            else:
                factor, answer = middle, closer
        return factor, answer
    return None


def promise_sensitivity(
    question: Question, winner: Deployment, priced: Sequence[Priced], grid: Grid
) -> list[BreakEven]:
    """The nearest shorter and longer promises with another answer."""
    found: list[BreakEven] = []
    usual = _quick_winner(question, priced, grid)
    for name, now in (("ttft", question.ttft_s), ("tpot", question.tpot_s)):

        def other(factor: float, name: str = name) -> str | None:
            changed = with_promise(question, **{name: factor})
            best = _quick_winner(changed, priced, grid)
            if best in (usual, winner.estimate.hardware):
                return None
            return "nothing that is looked at" if best is None else best.text

        for factors in _both_ways(TIMES):
            if (change := nearest(factors, other)) is not None:
                at = change[0] * now * 1e3
                found.append(BreakEven(f"{name.upper()} promise", now * 1e3, at, "ms", change[1]))
    return found


def _quick_winner(question: Question, priced: Iterable[Priced], grid: Grid) -> Hardware | None:
    benches = (under(question, one, grid) for one in priced)
    quick = (quick_estimate(bench, grid) for bench in benches if bench is not None)
    known = [estimate for estimate in quick if estimate is not None]
    return in_order(known, question.rate)[0].hardware if known else None
