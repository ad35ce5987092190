"""What becomes of requests whose replica is lost? By hand, with steps of a second."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from ridgeline.errors import ConfigError
from ridgeline.router.policies import LeastLoaded
from ridgeline.simulator.report import RequestTimeline, used_blocks
from ridgeline.simulator.simulation import Machine, Options, Outage, Simulation
from ridgeline.simulator.workload import Arrival, Workload, fixed, generate
from tests.simulator.worlds import LinearPricer, OneSecond

MACHINE = Machine(OneSecond(), 1000)


def simulate(work: Workload, *outages: Outage, num_replicas: int = 1) -> list[RequestTimeline]:
    options = Options(
        num_replicas=num_replicas,
        router=LeastLoaded() if num_replicas > 1 else None,
        max_in_flight=1,
        outages=outages,
    )
    return Simulation(MACHINE, work, options, rng=Random(0)).run().requests


def test_who_was_being_answered_begins_anew_when_the_only_replica_is_back() -> None:
    """Lost at 2.5 s with two of four tokens; back at 5 s, beside who came meanwhile."""
    work = (Arrival(0.0, 4, 4, id="0"), Arrival(3.0, 4, 2, id="1"))
    first, second = simulate(work, Outage(0, 2.5, 5.0))
    assert (first.first_token_s, first.finished_s, first.num_retries) == (6.0, 9.0, 1)
    assert (second.first_token_s, second.finished_s, second.num_retries) == (6.0, 7.0, 0)
    assert first.ttft_s == 6.0, "counted from when it first came"


def test_a_lost_replica_holds_no_blocks() -> None:
    options = Options(max_in_flight=1, outages=(Outage(0, 2.5, 5.0),))
    report = Simulation(MACHINE, (Arrival(0.0, 4, 4, id="0"),), options).run()
    used = [(when, blocks) for when, blocks in used_blocks(report.steps, 1) if when <= 5]
    assert used == [(1.0, 1), (2.0, 1), (2.5, 0)]
    assert report.num_steps == 2 + 4


def test_another_replica_takes_over_at_once() -> None:
    first, second = simulate(
        (Arrival(0.0, 4, 4, id="0"), Arrival(0.0, 4, 4, id="1")),
        Outage(0, 2.5, 50.0),
        num_replicas=2,
    )
    lost, kept = (first, second) if first.num_retries else (second, first)
    assert kept.finished_s == 4.0
    assert (lost.replica, lost.first_token_s, lost.finished_s) == (1, 4.0, 7.0)


def test_who_had_finished_is_left_alone() -> None:
    (only,) = simulate((Arrival(0.0, 4, 2, id="0"),), Outage(0, 2.5, 5.0))
    assert (only.finished_s, only.num_retries) == (2.0, 0)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_passing_over_steps_changes_nothing(num_replicas: int) -> None:
    work = generate(Random(3), rate=6.0, num_requests=60, num_input=fixed(30), num_output=fixed(40))
    options = Options(
        num_replicas=num_replicas,
        router=LeastLoaded(),
        max_num_seqs=6,
        outages=(Outage(0, 2.0, 3.5), Outage(0, 6.0, 9.0)),
    )
    machine = Machine(LinearPricer(), 400)
    fast, slow = (
        Simulation(machine, work, replace(options, macro_steps=macro), rng=Random(0)).run()
        for macro in (True, False)
    )
    assert fast.num_leaps > 0 == slow.num_leaps
    assert fast.summary().num_retries > 0
    for one, other in zip(fast.requests, slow.requests, strict=True):
        assert one.is_finished
        assert one.finished_s == pytest.approx(other.finished_s)
        assert one.first_token_s == pytest.approx(other.first_token_s)
        assert one.num_retries == other.num_retries


@pytest.mark.parametrize(
    ("outages", "says"),
    [
        ((Outage(1, 0.0, 1.0),), "replica 1: there are 1, from 0"),
        ((Outage(0, 0.0, 2.0), Outage(0, 1.0, 3.0)), "overlap"),
    ],
)
def test_outages_that_cannot_be(outages: tuple[Outage, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate((Arrival(0.0, 4, 2),), *outages)


def test_an_outage_ends_after_it_began() -> None:
    with pytest.raises(ConfigError, match="must end after"):
        Outage(0, 2.0, 2.0)
