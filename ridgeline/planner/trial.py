"""Does a plan keep its promise when requests come as they do? The simulator has the last word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from ridgeline.cost.chunk import mixed_tokens
from ridgeline.planner.estimate import Estimate
from ridgeline.planner.question import ATTAINMENT, Question
from ridgeline.simulator.executor import Speculation
from ridgeline.simulator.options import PLANS_AHEAD_S, Machine, Options
from ridgeline.simulator.report import Slo, percentile
from ridgeline.simulator.simulation import Simulation
from ridgeline.simulator.sweep import is_saturated
from ridgeline.simulator.workload import Lengths, Workload, generate

LEAST_REQUESTS, MOST_REQUESTS = 120, 500  # that count
LEAST_WARM_UP = 20


class Rng(Protocol):
    """The part of random.Random that workloads and simulations use."""

    def random(self) -> float: ...

    def randrange(self, stop: int, /) -> int: ...

    def gammavariate(self, alpha: float, beta: float, /) -> float: ...

    def randint(self, a: int, b: int, /) -> int: ...


RngMaker = Callable[[], Rng]  # each call begins the same sequence


@dataclass(frozen=True, slots=True)
class Trial:
    """One replica at `rate` requests a second. `share` of its requests got what was promised;
    times are the 95th percentiles in seconds. `is_saturated`: the queue kept growing."""

    rate: float
    share: float
    ttft_s: float
    tpot_s: float
    in_flight: float
    is_saturated: bool
    num_requests: int

    @property
    def keeps_promise(self) -> bool:
        return self.share >= ATTAINMENT and not self.is_saturated


def num_warm_up(estimate: Estimate, rate: float) -> int:
    """Arrivals until the first ones have left: Little's law."""
    return max(LEAST_WARM_UP, ceil(1.2 * rate * estimate.pace.e2e_s))


def num_requests(estimate: Estimate, rate: float) -> int:
    """How many a trial simulates: enough for the batch to fill up and change a few times."""
    warm_up = num_warm_up(estimate, rate)
    return warm_up + min(MOST_REQUESTS, max(LEAST_REQUESTS, 2 * warm_up))


def try_out(question: Question, estimate: Estimate, rate: float, rng_of: RngMaker) -> Trial:
    """Simulate one replica of this candidate at `rate` requests a second, with Poisson arrivals."""
    work = workload(question, num_requests(estimate, rate), rate, rng_of)
    candidate, priced = estimate.candidate, estimate.priced
    most = candidate.max_num_batched_tokens
    options = Options(
        num_replicas=1,
        max_num_seqs=candidate.max_num_seqs,
        max_num_batched_tokens=most,
        max_num_mixed_tokens=mixed_tokens(priced.setup, priced.target, most),
        max_model_len=question.max_model_len,
        speculation=_speculation(estimate),
        computes_in_submit=priced.setup.device.kind == "cpu",
        plans_ahead_s=PLANS_AHEAD_S,
    )
    machine = Machine(priced.target, estimate.memory.num_blocks, priced.windows)
    report = Simulation(machine, work, options, rng=rng_of()).run()
    counted = report.requests[num_warm_up(estimate, rate) :]
    slo = Slo(question.ttft_s, question.tpot_s)
    mean_e2e_s = sum(r.e2e_s or 0.0 for r in counted) / len(counted)
    return Trial(
        rate,
        sum(slo.is_kept(request) for request in counted) / len(counted),
        _p95([request.ttft_s for request in counted]),
        _p95([request.tpot_s for request in counted]),
        rate * mean_e2e_s,
        bool(is_saturated(report.requests)),
        len(work),
    )


def workload(question: Question, count: int, rate: float, rng_of: RngMaker) -> Workload:
    """Poisson arrivals; lengths evenly spread around their means."""
    return generate(
        rng_of(),
        rate=rate,
        num_requests=count,
        num_input=_around(question.num_input, question.spread),
        num_output=_around(question.num_output, question.spread),
    )


def _around(mean: int, spread: float) -> Lengths:
    reach = int(spread * mean)
    return Lengths(max(1, mean - reach), mean + reach)


def _speculation(estimate: Estimate) -> Speculation | None:
    drafts = estimate.priced.drafts
    if drafts is None:
        return None
    return Speculation.from_curve(drafts.num_drafts, drafts.curve, drafts.draft_seconds)


def _p95(values: Sequence[float | None]) -> float:
    ordered = sorted(value for value in values if value is not None)
    return percentile(ordered, 0.95) if ordered else 0.0
