"""A day of one tenant that asks for more than there is, and one that asks now and then: does the
second notice, and does anybody starve? One hour by default, the day in the slow run."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from ridgeline.simulator.options import Machine, Options
from ridgeline.simulator.report import RequestTimeline
from ridgeline.simulator.simulation import Simulation
from ridgeline.simulator.workload import Arrival
from tests.scheduler.policies.virtual_time import Linear

PRICER = Linear(1.0, 2e-3, 2e-6)  # coarse: a step takes a second, so a day has 86,400
SEATS, BUDGET, NUM_BLOCKS = 32, 1024, 2000
HOUR_S = 3600.0


@dataclass(frozen=True)
class Day:
    loud: list[RequestTimeline]
    calm: list[RequestTimeline]
    num_preemptions: int
    num_computed: int

    def first_s(self, share: float) -> float:
        """Of the calm one's first tokens."""
        waits = sorted((t.first_token_s or 1e9) - t.arrival_s for t in self.calm)
        return waits[int(share * (len(waits) - 1))]


def traffic(rng: random.Random, lasts_s: float) -> list[Arrival]:
    """Batches of eight from the loud one, a tenth more than the engine can do; a request in two
    minutes from the calm one."""
    found = []
    at = 0.0
    while (at := at + rng.expovariate(1 / 48)) < lasts_s:
        lengths = rng.randint(20, 800), rng.randint(50, 300)
        found += [Arrival(at, *lengths, tenant=b"loud") for _ in range(8)]
    at = 0.0
    while (at := at + rng.expovariate(1 / 120)) < lasts_s:
        found.append(Arrival(at, rng.randint(20, 400), rng.randint(20, 200), tenant=b"calm"))
    return sorted(found, key=lambda arrival: arrival.time_s)


def live(lasts_s: float, policy: str) -> Day:
    seed = 7
    workload = traffic(random.Random(seed), lasts_s)
    options = Options(
        policy=policy, max_num_seqs=SEATS, max_num_batched_tokens=BUDGET, block_size=16
    )
    report = Simulation(Machine(PRICER, NUM_BLOCKS), workload, options).run()
    by_tenant: dict[bytes, list[RequestTimeline]] = {b"loud": [], b"calm": []}
    for arrival, timeline in zip(workload, report.requests, strict=True):
        by_tenant[arrival.tenant].append(timeline)
    return Day(
        by_tenant[b"loud"],
        by_tenant[b"calm"],
        sum(timeline.num_preemptions for timeline in report.requests),
        sum(step.num_tokens for step in report.steps),
    )


def check(lasts_s: float) -> None:
    day = live(lasts_s, "fair")
    everybody = [*day.loud, *day.calm]
    ideal = sum(t.num_input + t.num_output for t in everybody)
    print(
        f"{lasts_s / HOUR_S:g} h, {len(day.loud)} and {len(day.calm)} requests: calm first token "
        f"p50 {day.first_s(0.5):.2f} s, p99 {day.first_s(0.99):.2f} s, most {day.first_s(1):.2f} s;"
        f" {day.num_preemptions} preemptions, {day.num_computed / ideal - 1:+.2%} computed"
    )
    assert all(t.finished_s is not None for t in everybody), "nobody starves"
    longest = PRICER.seconds(((BUDGET, 0),)) + 0.2
    assert day.first_s(0.99) <= 3 * longest  # those in flight, and its own
    assert day.num_computed < 1.02 * ideal


def test_an_hour_of_two_tenants() -> None:
    check(HOUR_S)


def test_first_come_first_served_lets_the_calm_one_wait() -> None:
    """What the policy is there for."""
    assert live(HOUR_S, "fcfs").first_s(0.99) > 60.0


@pytest.mark.slow
def test_a_day_of_two_tenants() -> None:
    check(24 * HOUR_S)
