"""What do replicas of an engine make of traffic? One simulated run, and a sweep over rates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Literal

from ridgeline import registry
from ridgeline.architectures.counts import kv_bytes
from ridgeline.cost.captured import mixed_tokens
from ridgeline.cost.ops import Op
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.roofline import op_cost
from ridgeline.cost.setup import Layout, Setup
from ridgeline.cost.throughput import Load, saturation
from ridgeline.lab.machine import pricer_of
from ridgeline.router import POLICIES as ROUTERS
from ridgeline.simulator.disaggregated import run_disaggregated
from ridgeline.simulator.executor import Speculation
from ridgeline.simulator.options import (
    PLANS_AHEAD_S,
    Limits,
    Machine,
    Options,
    Outage,
    limits_of,
    machine_of,
)
from ridgeline.simulator.report import RequestTimeline, Slo
from ridgeline.simulator.simulation import Simulation, SimulationReport
from ridgeline.simulator.sweep import Outcome, Sweep, sweeping
from ridgeline.simulator.workload import (
    HASH_BLOCK_TOKENS,
    Arrival,
    Lengths,
    Workload,
    arrival_times,
)
from ridgeline.speculation.price import DraftSteps, head_spec

SPREAD = 0.5  # lengths are drawn evenly from so much below their mean to so much above
FRACTIONS = (0.3, 0.6, 0.8, 0.9, 0.97)  # of the capacity, at which a sweep runs
FEWEST, MOST = 150, 1000  # requests of a run of a sweep
SWEPT = 2  # replicas
NOTHING = Slo()  # is promised
TURNS = 3  # times the fleet is filled in such a run


@dataclass(frozen=True, slots=True)
class Traffic:
    """`prefixes`: prompts begin with one of so many texts, but for their last tokens; 0: each is
    new."""

    rate: float
    num_input: int
    num_output: int
    arrivals: str = "poisson"
    prefixes: int = 0
    seed: int = 0

    def workload(self, count: int, rate: float | None = None) -> Workload:
        rng = Random(self.seed)
        times = arrival_times(rng, rate or self.rate, self.arrivals)
        prompts, answers = _around(self.num_input), _around(self.num_output)
        return tuple(self._arrival(next(times), prompts, answers, n, rng) for n in range(count))

    def _arrival(
        self, when: float, prompts: Lengths, answers: Lengths, number: int, rng: Random
    ) -> Arrival:
        num_input, num_output = prompts.draw(rng), answers.draw(rng)
        hashes: tuple[int, ...] = ()
        if self.prefixes:
            text = 1000 * rng.randrange(self.prefixes)
            hashes = tuple(text + n for n in range((num_input - 1) // HASH_BLOCK_TOKENS))
        return Arrival(when, num_input, num_output, hashes, id=str(number))


def _around(mean: int) -> Lengths:
    reach = int(SPREAD * mean)
    return Lengths(max(1, mean - reach), mean + reach)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`replicas` engines of `tp` devices each; the first `readers` of them only read prompts and
    the others only answer, or if there are none, each does both. Drafts come from a head of one
    layer, each right with chance `acceptance`."""

    model: str
    device: str
    weights: str = "bf16"
    kv: str = "auto"
    tp: int = 1
    replicas: int = 1
    readers: int = 0
    batching: Literal["continuous", "static"] = "continuous"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    num_drafts: int = 0
    acceptance: float = 0.7
    policy: str = "fcfs"
    router: str = "least-loaded"
    slo: Slo = NOTHING
    outages: tuple[Outage, ...] = ()

    @property
    def num_devices(self) -> int:
        return self.tp * self.replicas

    @property
    def pricer(self) -> Pricer:
        return pricer_of(self.model, self.device, self.weights, self.kv, layout=Layout(tp=self.tp))

    @property
    def setup(self) -> Setup:
        return self.pricer.setup

    def options(self) -> Options:
        is_static = self.batching == "static"
        bounds_itself = self.policy == "slo"
        return Options(
            num_replicas=self.replicas,
            router=registry.load(ROUTERS, self.router, "router policy")(),
            policy=self.policy,
            ttft_slo_s=self.slo.ttft_s,
            tpot_slo_s=self.slo.tpot_s,
            static_batching=is_static,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max(self.max_num_batched_tokens, self.max_num_seqs),
            max_num_mixed_tokens=None
            if is_static or bounds_itself
            else _mixed_tokens(self.pricer, self.max_num_batched_tokens),
            speculation=self._speculation() if self.num_drafts else None,
            plans_ahead_s=PLANS_AHEAD_S,
            outages=self.outages,
        )

    def _speculation(self) -> Speculation:
        head = pricer_of_head(self.pricer)
        chances = (self.acceptance,) * self.num_drafts
        return Speculation(self.num_drafts, chances, drafter=DraftSteps(head))

    def machine(self, work: Workload, options: Options) -> Machine:
        """One replica. Raises DoesNotFit."""
        return _machine(self.pricer, limits_of(self.setup, work, options))

    def run(self, work: Workload) -> SimulationReport:
        return self._run(work)[0]

    def outcome(self, work: Workload) -> Outcome:
        report, requests = self._run(work)
        return Outcome(requests, report.summary(self.slo))

    def _run(self, work: Workload) -> tuple[SimulationReport, list[RequestTimeline]]:
        """And the requests by which one sees whether the fleet keeps up."""
        options = self.options()
        machine = self.machine(work, options)
        if self.readers:
            return run_disaggregated(
                self.pricer, machine, work, options, self.readers, self.handing_s, lambda: Random(1)
            )
        report = Simulation(machine, work, options, rng=Random(1)).run()
        return report, report.requests

    def handing_s(self, num_tokens: int) -> float:
        """Seconds in which the keys and values of so many tokens come to another replica."""
        setup, precision = self.setup, self.setup.precision
        moved = kv_bytes(setup.spec, num_tokens, precision.dtype_bytes, precision.kv, self.tp)
        message = Op("kv", "point_to_point", 1, 0, 0, 0, moved, precision.short_dtype,
                     ranks=self.num_devices)  # fmt: skip
        return op_cost(message, setup.device, setup.constants).expected_s

    def estimate(self, traffic: Traffic) -> float:
        """Requests a second that all replicas can do, in closed form and without drafts."""
        options = self.options()
        machine = self.machine(traffic.workload(1), options)
        tokens = traffic.num_input + traffic.num_output
        places = machine.num_blocks // len(machine.windows) * options.block_size // tokens
        batch = max(1, min(self.max_num_seqs, places))
        load = Load(1, traffic.num_input, traffic.num_output, options.max_num_batched_tokens)
        return saturation(self.pricer, load, batch).request_rate * self.replicas

    def sweep(self, traffic: Traffic) -> Iterator[Sweep]:
        """Rate by rate, as far as it has come. Of more than SWEPT equal replicas so many are
        simulated, each at its share of the rate."""
        some = self if self.readers else replace(self, replicas=min(self.replicas, SWEPT))
        share = self.replicas / some.replicas
        count = max(FEWEST, min(MOST, TURNS * some.max_num_seqs * some.replicas))

        def at(rate: float) -> Outcome:
            return some.outcome(traffic.workload(count, rate))

        for found in sweeping(at, some.estimate(traffic), FRACTIONS):
            yield scaled(found, share)


def scaled(found: Sweep, share: float) -> Sweep:
    """Of so many times as many replicas."""
    points = [
        replace(
            point,
            rate=point.rate * share,
            done_per_s=point.done_per_s * share,
            tokens_per_s=point.tokens_per_s * share,
            capacity=point.capacity and point.capacity * share,
        )
        for point in found.points
    ]
    return Sweep(tuple(points), found.capacity and found.capacity * share)


@lru_cache(maxsize=16)
def pricer_of_head(target: Pricer) -> Pricer:
    """Of a draft head for that model, on the same devices."""
    setup = target.setup
    return Pricer(
        Setup(head_spec(setup.spec), setup.device, setup.layout, setup.precision, setup.calibration)
    )


@lru_cache(maxsize=16)
def _mixed_tokens(pricer: Pricer, budget: int) -> int | None:
    return mixed_tokens(pricer.setup, pricer, budget)


@lru_cache(maxsize=16)
def _machine(pricer: Pricer, limits: Limits) -> Machine:
    return machine_of(pricer.setup, limits)
