"""Which deployment is the answer, why, and what is to be typed?

Intent in, configuration and reasons out.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ridgeline.architectures.spec import missing
from ridgeline.figures import number, scaled
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
from ridgeline.planner.question import (
    ATTAINMENT,
    GRID,
    MAX_LOAD,
    NODE,
    Grid,
    Hardware,
    Question,
    hardware_of,
)
from ridgeline.planner.search import WORK, Deployment, RngMaker, Search, best_of_each, in_order
from ridgeline.planner.sensitivity import BreakEven, sensitivity_of

CLOSE_LOOKS = 40  # hardware, the cheapest by a quick look, of which all limits are tried
WITH_DRAFTS = 6  # of these are also looked at with drafts


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
    sensitivity: tuple[BreakEven, ...]
    out: tuple[Rejection, ...]
    estimates: tuple[Estimate, ...]
    num_validations: int


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
        search.num_validations += more.num_validations
    sensitivity = () if winner is None else sensitivity_of(question, winner, served, grid)
    why = "" if winner is not None else why_nothing(question, served, out)
    return Plan(
        question,
        winner,
        runner_up,
        unserved,
        why,
        sensitivity,
        tuple(out),
        tuple(estimates),
        search.num_validations,
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
    """The first few again, with drafts."""
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
    said = f"{nearest.kind}{link} on {nearest.hardware.text} {nearest.because}"
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
        f"infeasible because the cheapest that keeps the promise, {cheapest.hardware.text}, takes "
        f"${cost:.2f} an hour and the budget is ${budget:.2f}"
    )
    return said + (f", which carries {number(reach)} requests/s" if reach else "")


@dataclass(frozen=True, slots=True)
class Reason:
    """`what` was chosen to be `choice`, `because`."""

    what: str
    choice: str
    because: str


def commands(question: Question, deployment: Deployment) -> tuple[str, ...]:
    """One `ridgeline serve` for each machine."""
    return tuple(
        shlex.join(
            ["ridgeline", "serve", question.model]
            + [word for name, value in found.items() for word in (f"--{name}", str(value))]
        )
        for found in settings(question, deployment)
    )


def settings(question: Question, deployment: Deployment) -> list[dict[str, str | int]]:
    """The flags of each machine's server, which has as many replicas as there are devices for. One
    that needs several machines waits for the ranks of the others, at an address to fill in."""
    estimate = deployment.estimate
    hardware, candidate, layout = estimate.hardware, estimate.candidate, estimate.hardware.layout
    link = hardware.device.link
    on_cpu = hardware.device.kind == "cpu"
    found: dict[str, str | int] = {
        "device": "cpu" if on_cpu else "cuda",
        "dtype": hardware.precision.dtype,
        "max-model-len": question.max_model_len,
        "max-num-seqs": candidate.max_num_seqs,
        "max-num-batched-tokens": candidate.max_num_batched_tokens,
    }
    if hardware.device.threads is not None:
        found["threads"] = hardware.device.threads
    found |= {
        name: size for name in ("tp", "pp", "dp", "ep") if (size := getattr(layout, name)) > 1
    }
    node = NODE if link is None else max(1, link.max_devices)
    if layout.devices > node:
        found |= {"launcher": "join", "join-address": "HOST:7070"}
    most = max(1, node // layout.devices)
    counts = [min(most, deployment.replicas - done) for done in range(0, deployment.replicas, most)]
    return [found | ({"replicas": count} if count > 1 else {}) for count in counts]


def promise_flags(question: Question) -> str:
    """What to add so that the promise holds in overload too, by refusing what would break it."""
    ttft_ms, tpot_ms = question.ttft_s * 1e3, question.tpot_s * 1e3
    return f"--policy slo --ttft-slo-ms {ttft_ms:g} --tpot-slo-ms {tpot_ms:g}"


# ---------------------------------------------------------------------- why


def reasons(plan: Plan) -> tuple[Reason, ...]:
    """Why each part of the winner is as it is. () where there is none."""
    if plan.winner is None:
        return ()
    question, winner = plan.question, plan.winner
    same = [e for e in plan.estimates if e.hardware == winner.estimate.hardware]
    return (
        _device_reason(plan, winner),
        _count_reason(winner),
        _format_reason(plan, winner),
        _batch_reason(question, winner),
        _budget_reason(winner, same),
        _length_reason(question),
    )


def _device_reason(plan: Plan, winner: Deployment) -> Reason:
    hardware, runner_up = winner.estimate.hardware, plan.runner_up
    because = "the only one that keeps the promise"
    if runner_up is not None:
        because = (
            f"the cheapest that keeps the promise: {dollars(winner)} against {dollars(runner_up)} "
            f"for {count_text(runner_up)}"
        )
    elif len({estimate.hardware for estimate in plan.estimates}) > 1:
        because = "the cheapest that keeps the promise"
    return Reason("device", hardware.device.name, because)


def _count_reason(winner: Deployment) -> Reason:
    estimate = winner.estimate
    limit = "the promise" if estimate.kept < MAX_LOAD * estimate.saturation else "saturation"
    each = winner.rate / winner.replicas
    because = (
        f"one replica carries up to {number(estimate.planned)} requests/s, by {limit}; saturated "
        f"it would do {number(estimate.saturation)}. Here each has {number(each)}, "
        f"{winner.load:.0%} of saturation; {MAX_LOAD:.0%} are never exceeded"
    )
    return Reason("replicas", str(winner.replicas), because)


def _format_reason(plan: Plan, winner: Deployment) -> Reason:
    weights, kv = winner.estimate.hardware.precision.names
    weight_bytes = winner.estimate.memory.weight_bytes
    because = f"{scaled(weight_bytes, 'B')} of weights; plans keep the numbers of the checkpoint"
    if plan.unserved is not None and plan.unserved.cost < winner.cost:
        because += f"; {plan.unserved.estimate.hardware.text} would be cheaper"
    return Reason("formats", f"{weights} weights, {kv} KV cache", because)


def _batch_reason(question: Question, winner: Deployment) -> Reason:
    estimate, validation = winner.estimate, winner.validation
    because = (
        f"{validation.in_flight:.0f} requests are in flight on average; up to {estimate.batch} "
        f"keep {question.tpot_s * 1e3:g} ms a token, and the KV cache has room for "
        f"{estimate.room}"
    )
    return Reason("max_num_seqs", str(estimate.candidate.max_num_seqs), because)


def _budget_reason(winner: Deployment, same: Sequence[Estimate]) -> Reason:
    chosen = winner.estimate.candidate
    others = {}
    for estimate in same:
        if estimate.candidate.max_num_seqs == chosen.max_num_seqs:
            others[estimate.candidate.max_num_batched_tokens] = estimate.planned
    rates = ", ".join(f"{budget}: {number(rate)}/s" for budget, rate in sorted(others.items()))
    because = f"what a replica carries within the promise by token budget: {rates}"
    return Reason("max_num_batched_tokens", str(chosen.max_num_batched_tokens), because)


def _length_reason(question: Question) -> Reason:
    because = f"lengths are planned to vary by {question.spread:.0%} around their means"
    return Reason("max_model_len", str(question.max_model_len), because)


# ---------------------------------------------------------------------- figures


def count_text(deployment: Deployment) -> str:
    """For example "3 x h100-sxm, bf16 weights"."""
    return f"{deployment.replicas} x {deployment.estimate.hardware.text}"


def dollars(deployment: Deployment) -> str:
    """Per hour, with its band where low and high prices differ."""
    band = deployment.dollars
    if band is None:
        return f"{deployment.num_devices} devices of unknown price"
    low, mid, high = band
    return f"${mid:.2f}/h" + (f" (${low:.2f} to ${high:.2f})" if low < high else "")


def promise_text(question: Question) -> str:
    return (
        f"first token within {question.ttft_s * 1e3:g} ms and {question.tpot_s * 1e3:g} ms a token "
        f"after it, for {ATTAINMENT:.0%} of the requests"
    )
