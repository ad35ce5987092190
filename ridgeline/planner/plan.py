"""Intent in, configuration and reasons out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ridgeline.architectures.spec import missing
from ridgeline.figures import number
from ridgeline.planner.candidates import GRID, Grid, Hardware, hardware_of
from ridgeline.planner.estimate import (
    DOES_NOT_FIT,
    INFEASIBLE,
    NO_PRICE,
    TOO_DEAR,
    Bench,
    Estimate,
    Rejection,
    estimates_of,
    open_bench,
    quick_estimate,
)
from ridgeline.planner.flips import Flip, flips_of
from ridgeline.planner.question import Question
from ridgeline.planner.search import WORK, Deployment, Search, best_of_each, in_order
from ridgeline.planner.trial import RngMaker

CLOSE_LOOKS = 40  # hardware, the cheapest by a quick look, of which all limits are tried
WITH_DRAFTS = 6  # of these are also looked at with guesses


@dataclass(frozen=True, slots=True)
class Plan:
    """`winner` can be served by this version, None: nothing can. `unserved` is what would be
    cheaper if this version could serve it; only when it was asked for. `why_none` says what is in
    the way where there is no winner; `out` why devices are out."""

    question: Question
    winner: Deployment | None
    runner_up: Deployment | None
    unserved: Deployment | None
    why_none: str
    flips: tuple[Flip, ...]
    out: tuple[Rejection, ...]
    estimates: tuple[Estimate, ...]
    num_trials: int


def plan(question: Question, rng_of: RngMaker, grid: Grid = GRID, work: int = WORK) -> Plan:
    """The cheapest deployment that keeps the promise. `rng_of` makes equal random sequences."""
    estimates, out = look_at_all(question, grid)
    served = [e for e in estimates if not e.hardware.why_not_served]
    search = Search(question, rng_of, work)
    affordable = within_budget(question, served, out)
    winner = search.cheapest(affordable)
    runner_up = unserved = None
    if winner is not None:
        runner_up = next_best(search, winner, affordable)
    if question.include_unserved:
        others = within_budget(question, [e for e in estimates if e.hardware.why_not_served], [])
        more = Search(question, rng_of, work // 2)
        unserved = more.cheapest(others)
        search.num_trials += more.num_trials
    flips = () if winner is None else flips_of(question, winner, served, grid)
    why = "" if winner is not None else why_nothing(question, served, out)
    return Plan(
        question,
        winner,
        runner_up,
        unserved,
        why,
        flips,
        tuple(out),
        tuple(estimates),
        search.num_trials,
    )


# ---------------------------------------------------------------------- what there is


def look_at_all(question: Question, grid: Grid) -> tuple[list[Estimate], list[Rejection]]:
    """All candidates of the most promising hardware, and why other hardware is out."""
    benches: list[Bench] = []
    out: list[Rejection] = []
    for hardware in hardware_of(question, grid):
        found = open_bench(question, hardware, grid)
        if isinstance(found, Rejection):
            out.append(found)
        else:
            benches.append(found)
    chosen = _promising(question, benches, out, grid)
    if question.include_unserved:
        chosen += _with_drafts(question, chosen, grid)
    estimates = []
    for bench in chosen:
        found_here = list(estimates_of(bench, grid))
        estimates += found_here
        if not found_here:
            out.append(_no_limits_help(bench.hardware))
    return estimates, out


def _promising(
    question: Question, benches: Iterable[Bench], out: list[Rejection], grid: Grid
) -> list[Bench]:
    """Those that look cheapest; all that could be served where there are few."""
    quick: dict[Hardware, tuple[Estimate, Bench]] = {}
    for bench in benches:
        found = quick_estimate(bench, grid)
        if found is None:
            out.append(_no_limits_help(bench.hardware))
        else:
            quick[bench.hardware] = (found, bench)
    order = in_order((estimate for estimate, _ in quick.values()), question.rate)
    served = [e for e in order if not e.hardware.why_not_served][:CLOSE_LOOKS]
    others = [e for e in order if e.hardware.why_not_served][: CLOSE_LOOKS // 2]
    return [quick[estimate.hardware][1] for estimate in (*served, *others)]


def _with_drafts(question: Question, benches: Sequence[Bench], grid: Grid) -> list[Bench]:
    """The first few again, with guesses."""
    found = []
    for bench in benches[:WITH_DRAFTS]:
        for num_drafts in grid.drafts:
            other = open_bench(question, replace(bench.hardware, num_drafts=num_drafts), grid)
            if isinstance(other, Bench):
                found.append(other)
    return found


def _no_limits_help(hardware: Hardware) -> Rejection:
    because = "no batch limit and token budget keep both promises, even to one request at a time"
    return Rejection(hardware, INFEASIBLE, because)


def within_budget(
    question: Question, estimates: Sequence[Estimate], out: list[Rejection]
) -> list[Estimate]:
    """Those whose fewest replicas can be paid; the others are named in `out`."""
    if question.budget is None:
        return list(estimates)
    kept: list[Estimate] = []
    dear: list[Estimate] = []
    for estimate in estimates:
        least = estimate.cost(estimate.least_replicas(question.rate))
        (kept if least <= question.budget else dear).append(estimate)
    affordable = {estimate.hardware for estimate in kept}
    for estimate in best_of_each(dear, question.rate):
        if estimate.hardware not in affordable:
            cost = estimate.cost(estimate.replicas(question.rate))
            out.append(Rejection(estimate.hardware, TOO_DEAR, f"it takes ${cost:.2f} an hour"))
    return kept


def next_best(
    search: Search, winner: Deployment, estimates: Sequence[Estimate]
) -> Deployment | None:
    """The cheapest with other hardware."""
    own = winner.estimate.hardware
    others = [e for e in estimates if e.hardware != own]
    for estimate in list(best_of_each(others, search.question.rate))[:2]:
        found = search.settle(estimate, estimate.replicas(search.question.rate))
        if found is not None:
            return found
    return None


# ---------------------------------------------------------------------- where there is nothing


def why_nothing(question: Question, served: Sequence[Estimate], out: Sequence[Rejection]) -> str:
    """One sentence: what is in the way."""
    if needs := missing(question.spec):
        return f"this version cannot serve this model, which needs {', '.join(needs)}"
    dear = [one for one in out if one.kind == TOO_DEAR]
    if dear or (served and question.budget is not None):
        return _over_budget(question, served)
    if served:
        return (
            "saturated: in simulation no number of replicas that was tried kept the promise to "
            "95 % of the requests"
        )
    served_out = [one for one in out if not one.hardware.why_not_served and one.kind != NO_PRICE]
    if not served_out:
        return "infeasible because this version serves none of these devices"
    nearest = min(served_out, key=lambda one: (one.kind != INFEASIBLE, one.miss))
    link = ":" if nearest.kind == DOES_NOT_FIT else " because"
    said = f"{nearest.kind}{link} on {nearest.hardware.words} {nearest.because}"
    if len(served_out) == 1:
        return said
    return f"{said}; it comes nearest of {len(served_out)} that were looked at"


def _over_budget(question: Question, served: Sequence[Estimate]) -> str:
    cheapest = in_order(served, question.rate)[0]
    cost = cheapest.cost(cheapest.replicas(question.rate))
    budget = question.budget or 0.0
    price = cheapest.cost(1)
    reach = int(budget / price) * cheapest.planned if price else 0.0
    said = (
        f"infeasible because the cheapest that keeps the promise, {cheapest.hardware.words}, takes "
        f"${cost:.2f} an hour and the budget is ${budget:.2f}"
    )
    return said + (f", which carries {number(reach)} requests/s" if reach else "")
