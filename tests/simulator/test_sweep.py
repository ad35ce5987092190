"""Where does it saturate? Against a queue whose capacity and waits are known in closed form."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from ridgeline.errors import ConfigError
from ridgeline.simulator.report import RequestTimeline, summarize
from ridgeline.simulator.sweep import (
    SATURATED_SLOPE,
    Outcome,
    capacity_seen,
    find_capacity,
    is_saturated,
    slope,
    sweep,
    sweeping,
    ttft_slope,
)
from ridgeline.simulator.workload import fixed, generate

SERVICE_S = 0.25  # so that its capacity is 4 requests a second


@dataclass
class OneServer:
    """Poisson arrivals to one server of constant service time: M/D/1."""

    num_requests: int = 2000
    arrivals: str = "poisson"
    rates: list[float] = field(default_factory=list)

    def __call__(self, rate: float) -> Outcome:
        self.rates.append(rate)
        work = generate(
            Random(7),
            rate=rate,
            num_requests=self.num_requests,
            num_input=fixed(1),
            num_output=fixed(1),
            arrivals=self.arrivals,
        )
        free, done = 0.0, []
        for a in work:
            start = max(free, a.time_s)
            free = start + SERVICE_S
            done.append(RequestTimeline(a.id, a.time_s, 1, 1, 0, start, free, free))
        return Outcome(done, summarize(done, [], num_slots=1, num_blocks=1))


@pytest.mark.parametrize("start", [0.5, 3.9, 5.0, 60.0])
def test_the_capacity_is_found_from_anywhere(start: float) -> None:
    *_, last = find_capacity(OneServer(), start)
    assert last.capacity == pytest.approx(4.0, rel=0.04)


@pytest.mark.parametrize("arrivals", ["uniform", "bursty"])
def test_the_capacity_does_not_depend_on_the_pattern(arrivals: str) -> None:
    *_, last = find_capacity(OneServer(arrivals=arrivals), 1.0)
    assert last.capacity == pytest.approx(1 / SERVICE_S, rel=0.1)


def test_a_good_guess_needs_one_run() -> None:
    server = OneServer()
    assert len(list(find_capacity(server, 4.0))) == 1
    assert server.rates == [pytest.approx(5.2)]


def test_a_sweep_is_told_run_by_run() -> None:
    told = list(sweeping(OneServer(), 4.0, fractions=(0.5, 0.2)))
    assert [len(found.points) for found in told] == [1, 1, 2, 3]
    assert told[-1] == sweep(OneServer(), 4.0, fractions=(0.5, 0.2))


def test_points_below_keep_up_and_points_above_do_not() -> None:
    found = sweep(OneServer(), 4.0, fractions=(0.2, 0.5, 0.8, 1.1, 1.2, 2.0))
    assert [p.is_saturated for p in found.points] == [False, False, False, True, True, True]
    assert found.points[-1].rate == pytest.approx(5.2)
    assert found.capacity == pytest.approx(4.0, rel=0.04)
    assert [p.rate for p in found.points] == sorted(p.rate for p in found.points)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_waits_are_those_of_the_formula(load: float) -> None:
    """Pollaczek and Khinchine, constant service: load / (2 (1 - load)) service times."""
    outcome = OneServer(20_000)(load / SERVICE_S)
    expected = load / (2 * (1 - load)) * SERVICE_S
    assert outcome.summary.queue_s.mean == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("load", [1.1, 1.5, 3.0])
def test_above_capacity_the_slope_is_the_excess(load: float) -> None:
    requests = OneServer()(load / SERVICE_S).requests
    assert ttft_slope(requests) == pytest.approx(load - 1, rel=0.25)
    assert capacity_seen(requests) == pytest.approx(1 / SERVICE_S, rel=0.02)


def test_what_never_saturates_is_said_so() -> None:
    def instant(rate: float) -> Outcome:
        work = [
            RequestTimeline(str(i), i / rate, 1, 1, 0, 0, i / rate, i / rate) for i in range(99)
        ]
        return Outcome(work, summarize(work, [], num_slots=1, num_blocks=1))

    found = sweep(instant, 1.0, fractions=(0.5, 1.0))
    assert found.capacity is None
    assert not any(p.is_saturated for p in found.points)


def test_too_few_to_tell() -> None:
    server = OneServer(10)
    assert is_saturated(server(100.0).requests) is None
    with pytest.raises(ConfigError, match="10 requests are too few"):
        sweep(server, 1.0)


def test_only_a_rate_can_be_swept() -> None:
    with pytest.raises(ConfigError, match="rate"):
        sweep(OneServer(), 0.0)


def test_a_line_through_points() -> None:
    assert slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == pytest.approx(2.0)
    assert slope([(1.0, 1.0), (1.0, 3.0)]) is None


def test_one_slow_moment_is_no_saturation() -> None:
    """A burst near the end makes the line rise; the points do not follow it."""
    work = OneServer(400)(1.0).requests
    for request in list(work)[360:390]:
        request.first_token_s = (request.first_token_s or 0.0) + 40.0
    assert (ttft_slope(work) or 0.0) > SATURATED_SLOPE
    assert is_saturated(work) is False
