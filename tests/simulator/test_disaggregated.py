"""Do replicas that only read and those that only answer take what their steps take?"""

from __future__ import annotations

from random import Random

import pytest

from ridgeline.cost.pricer import Pricer
from ridgeline.lab.machine import pricer_of
from ridgeline.simulator.disaggregated import run_disaggregated
from ridgeline.simulator.options import Machine, Options
from ridgeline.simulator.simulation import Simulation, SimulationReport
from ridgeline.simulator.workload import Arrival
from tests.observe.priced import small_setup

PROMPT, ANSWER, HANDING_S = 50, 20, 0.125


def ran(
    work: tuple[Arrival, ...], pricer: Pricer, readers: int = 1, replicas: int = 2
) -> SimulationReport:
    options = Options(num_replicas=replicas, max_num_batched_tokens=4096)
    machine = Machine(pricer, 4000)
    if not readers:
        return Simulation(machine, work, options).run()
    return run_disaggregated(
        pricer, machine, work, options, readers, lambda num_tokens: HANDING_S, lambda: Random(0)
    )[0]


def test_a_request_alone_takes_its_prompt_the_way_and_its_steps() -> None:
    pricer = Pricer(small_setup())
    report = ran((Arrival(0.0, PROMPT, ANSWER),), pricer)
    (seen,) = report.requests
    steps_s = sum(pricer.seconds(((1, PROMPT + i),)) for i in range(ANSWER - 1))
    assert seen.first_token_s == pytest.approx(pricer.seconds(((PROMPT, 0),)), rel=1e-9)
    assert seen.e2e_s == pytest.approx((seen.ttft_s or 0) + HANDING_S + steps_s, rel=1e-9)
    assert (seen.read_by, seen.replica, seen.num_output) == (0, 1, ANSWER)
    assert report.num_steps == ANSWER


def test_a_long_prompt_delays_nobody_who_is_answered() -> None:
    """Less than 5 %, where a replica that does both makes all wait for a whole step of it."""
    pricer = pricer_of("llama-3.1-8b", "h100-sxm")
    short = tuple(Arrival(0.0, PROMPT, 200, id=f"{i}") for i in range(8))
    answered_s = 200 * pricer.seconds(((1, PROMPT),) * 8)
    slowest = {}
    for readers, replicas, begin_s in ((0, 1, 0.0), (1, 2, HANDING_S)):
        work = (*short, Arrival(begin_s + answered_s / 2, 32_000, 1, id="long"))
        for asked in (short, work):
            summary = ran(asked, pricer, readers, replicas).summary()
            slowest[readers, len(asked)] = summary.tpot_s.max or 0.0
    assert slowest[1, 9] < 1.05 * slowest[1, 8]
    assert slowest[0, 9] > 1.5 * slowest[0, 8]


def test_everybody_is_read_and_answered_once() -> None:
    rng = Random(5)
    work = tuple(
        Arrival(0.001 * i, rng.randint(1, 300), rng.randint(1, 40), id=f"{i}") for i in range(60)
    )
    report = ran(work, Pricer(small_setup()), readers=2, replicas=5)
    assert all(one.is_finished for one in report.requests)
    assert [one.num_output for one in report.requests] == [one.num_output for one in work]
    for one in report.requests:
        if one.num_output > 1:
            assert (one.read_by or 0) < 2 <= one.replica
            assert (one.finished_s or 0) > (one.first_token_s or 0) + HANDING_S
        else:
            assert one.finished_s == one.first_token_s
