"""Which candidate is the cheapest that keeps the promise? Branch and bound over validation runs.

The closed form orders the candidates and says what none of them can do (carry more than a fixed
share of its saturation); the simulator, under requests that come as they do, says how many
replicas each really needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, log

from ridgeline.clock import Rng
from ridgeline.cost.captured import mixed_tokens
from ridgeline.planner.estimate import Estimate
from ridgeline.planner.question import ATTAINMENT, Question
from ridgeline.simulator.executor import Speculation
from ridgeline.simulator.options import PLANS_AHEAD_S, Options, priced_machine
from ridgeline.simulator.report import Slo, percentile
from ridgeline.simulator.simulation import Simulation
from ridgeline.simulator.sweep import is_saturated
from ridgeline.simulator.workload import Lengths, Workload, generate

LEAST_REQUESTS, MOST_REQUESTS = 120, 500  # that count
LEAST_WARM_UP = 20


RngMaker = Callable[[], Rng]  # each call begins the same sequence


@dataclass(frozen=True, slots=True)
class Validation:
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
    return max(LEAST_WARM_UP, ceil(1.2 * rate * estimate.throughput.e2e_s))


def num_requests(estimate: Estimate, rate: float) -> int:
    """How many a validation simulates: enough for the batch to fill up and change a few times."""
    warm_up = num_warm_up(estimate, rate)
    return warm_up + min(MOST_REQUESTS, max(LEAST_REQUESTS, 2 * warm_up))


def validate(question: Question, estimate: Estimate, rate: float, rng_of: RngMaker) -> Validation:
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
    num_blocks = estimate.memory.num_blocks
    machine = priced_machine(priced.setup, num_blocks, priced.windows, priced.target)
    report = Simulation(machine, work, options, rng=rng_of()).run()
    counted = report.requests[num_warm_up(estimate, rate) :]
    slo = Slo(question.ttft_s, question.tpot_s)
    mean_e2e_s = sum(r.e2e_s or 0.0 for r in counted) / len(counted)
    return Validation(
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


WORK = 3000  # requests that are simulated for one question
FAR_TOO_FULL = 1.4  # times what the closed form says a replica can carry
SIMILAR = 1.15  # times: rates that are no reason to choose between candidates
TRIES = 3  # candidates of one hardware that are simulated
GROWTH = (1.15, 1.4, 2.0, 3.0)  # times the first number of replicas, when they are too few
CLOSE_ENOUGH = 0.03  # of the number of replicas: not worth another simulation


@dataclass(frozen=True, slots=True)
class Deployment:
    """`replicas` of a candidate, and what a simulation of one of them gave."""

    estimate: Estimate
    replicas: int
    rate: float  # requests a second, of all replicas
    validation: Validation

    @property
    def cost(self) -> float:
        """Dollars an hour at middle prices; where prices are unknown, devices."""
        return self.estimate.cost(self.replicas)

    @property
    def num_devices(self) -> int:
        return self.replicas * self.estimate.hardware.layout.devices

    @property
    def load(self) -> float:
        """Share of its saturation that each replica is used at."""
        return self.rate / self.replicas / self.estimate.saturation

    @property
    def dollars(self) -> tuple[float, float, float] | None:
        """Low, middle and high price of an hour of all of it; None where no price is known."""
        price = self.estimate.hardware.offer.price
        if price is None:
            return None
        low, mid, high = (self.num_devices * value for value in (price.low, price.mid, price.high))
        return low, mid, high


@dataclass(slots=True)
class Search:
    """Trials for one question. `work_left` bounds the time they take."""

    question: Question
    rng_of: RngMaker
    work_left: int = WORK
    num_validations: int = 0

    def cheapest(self, estimates: Sequence[Estimate]) -> Deployment | None:
        """The best of them, in dollars an hour; None where none keeps the promise in budget."""
        best: Deployment | None = None
        budget = inf if self.question.budget is None else self.question.budget * (1 + 1e-9)
        tried: Counter[object] = Counter()
        for estimate in in_order(estimates, self.question.rate):
            below = budget if best is None else best.cost
            start = self._first_count(estimate, below)
            if start is None or tried[estimate.hardware] >= TRIES:
                continue
            if self.work_left <= 0 and best is not None:
                break
            tried[estimate.hardware] += 1
            found = self.settle(estimate, start, below)
            best = found or best
        return best

    def _first_count(self, estimate: Estimate, below: float) -> int | None:
        """How many replicas to try first; None: it cannot cost less than `below`."""
        rate = self.question.rate
        count = estimate.replicas(rate)
        while estimate.cost(count) >= below and count > estimate.least_replicas(rate):
            count -= 1
        is_too_full = rate / count > FAR_TOO_FULL * estimate.kept
        return None if estimate.cost(count) >= below or is_too_full else count

    def settle(self, estimate: Estimate, start: int, below: float = inf) -> Deployment | None:
        """The fewest replicas that keep the promise and cost less than `below`, tried from `start`
        on: more while they are too few, then fewer."""
        too_few, count = 0, start
        found = self.carries(estimate, start)
        for growth in GROWTH:
            if found is not None:
                break
            too_few, count = count, max(count + 1, ceil(growth * start))
            if estimate.cost(count) >= below:
                return None
            found = self.carries(estimate, count)
        while found is not None and self.work_left > 0:
            fewer = self._fewer(estimate, too_few, found.replicas)
            if fewer is None:
                break
            better = self.carries(estimate, fewer)
            if better is None:
                too_few = fewer
            found = better or found
        return found

    def _fewer(self, estimate: Estimate, too_few: int, enough: int) -> int | None:
        """How many to try between what is too few and what is enough; None: it is settled."""
        rate = self.question.rate
        least = max(estimate.least_replicas(rate), ceil(rate / (FAR_TOO_FULL * estimate.kept)))
        low = max(too_few + 1, least)
        if low >= enough or enough - low < CLOSE_ENOUGH * enough - 1:
            return None
        fewer = (low + enough) // 2 if too_few else min(enough - 1, int(0.95 * enough))
        return max(low, fewer)

    def carries(self, estimate: Estimate, count: int) -> Deployment | None:
        """With so many replicas, if none is too full and a simulated one keeps the promise."""
        rate = self.question.rate / count
        if rate > estimate.most * (1 + 1e-9):
            return None
        validation = self._try(estimate, rate)
        if not validation.keeps_promise:
            return None
        return Deployment(estimate, count, self.question.rate, validation)

    def _try(self, estimate: Estimate, rate: float) -> Validation:
        self.num_validations += 1
        self.work_left -= num_requests(estimate, rate)
        return validate(self.question, estimate, rate, self.rng_of)


def in_order(estimates: Iterable[Estimate], rate: float) -> list[Estimate]:
    """Cheapest first; of equally cheap ones those with places enough and most to spare, in coarse
    steps, and of these the one with the smallest batch limit."""
    return sorted(
        estimates,
        key=lambda e: (
            e.cost(e.replicas(rate)),
            e.is_crowded(rate),
            -floor(log(e.planned) / log(SIMILAR)),
            e.candidate.max_num_seqs,
            -e.candidate.max_num_batched_tokens,
        ),
    )


def best_of_each(estimates: Iterable[Estimate], rate: float) -> Iterator[Estimate]:
    """The first of each hardware."""
    seen: set[object] = set()
    for estimate in in_order(estimates, rate):
        if estimate.hardware not in seen:
            seen.add(estimate.hardware)
            yield estimate
