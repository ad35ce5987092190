"""At what rate does it no longer keep up? A throughput-latency curve and the place where it ends.

When more work arrives than is done, the time to the first token grows with every request: over the
arrival times its slope is (rate - capacity) / capacity, as the request that comes after a time t
waits until the work of rate * t requests is done. So the slope both tells whether a run is
saturated and, from a run that is, what the capacity was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ridgeline.errors import ConfigError
from ridgeline.simulator.report import RequestTimeline, Summary
from ridgeline.simulator.workload import check_rate

SATURATED_SLOPE = 0.03  # seconds of TTFT gained per second; noise of a steady run stays below it
WARM_UP_SHARE = 0.3  # of the arrivals: batch and cache fill up first
MIN_GROWTH = 2.0  # of TTFT, in standard deviations about the line
LEAST_REQUESTS = 20  # for a slope that means anything
FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.05)  # of the capacity
OVERLOAD = 1.3  # where the capacity is looked for: far enough above it to be sure, and no further
CLOSE_TO_IT = (1.15, 1.5)
MAX_PROBES = 6


def ttft_slope(requests: Sequence[RequestTimeline]) -> float | None:
    """Seconds of TTFT gained per second of arrivals, after the warm-up; None for too few."""
    points = settled(requests)
    return slope(points) if len(points) >= LEAST_REQUESTS else None


def settled(requests: Sequence[RequestTimeline]) -> list[tuple[float, float]]:
    """(arrival, TTFT) of the requests after the warm-up, by arrival."""
    points = sorted((r.arrival_s, r.ttft_s) for r in requests if r.ttft_s is not None)
    return points[int(len(points) * WARM_UP_SHARE) :]


def capacity_seen(requests: Sequence[RequestTimeline]) -> float | None:
    """Requests a second that a saturated run could do; None: too few to tell."""
    found = ttft_slope(requests)
    return None if found is None else arrival_rate(requests) / (1 + found)


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Of the least-squares line through the points; None when all have the same x."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread <= 0:
        return None
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def is_saturated(requests: Sequence[RequestTimeline]) -> bool | None:
    """Does TTFT grow, and by more than it scatters about the line? None: too few to tell."""
    if (found := ttft_slope(requests)) is None:
        return None
    start, end = settled_window(requests)
    scatter = _scatter(settled(requests), found)
    return found > SATURATED_SLOPE and found * (end - start) > MIN_GROWTH * scatter


def _scatter(points: Sequence[tuple[float, float]], found: float) -> float:
    """Standard deviation of y about the line of slope `found` through the points."""
    rest = [y - found * x for x, y in points]
    mean = sum(rest) / len(rest)
    return math.sqrt(sum((value - mean) ** 2 for value in rest) / len(rest))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated run at one rate."""

    requests: Sequence[RequestTimeline]
    summary: Summary


@dataclass(frozen=True, slots=True)
class Point:
    """Of the curve. `rate` is what was offered, a second; `done_per_s` (requests) and
    `tokens_per_s` (of answers) what is done: all that comes, or the capacity. `slope` is what TTFT
    gained; `capacity` what it could do, which a run that keeps up does not tell."""

    rate: float
    summary: Summary
    done_per_s: float
    tokens_per_s: float
    slope: float
    capacity: float | None = None

    @property
    def is_saturated(self) -> bool:
        return self.capacity is not None

    @property
    def goodput_per_s(self) -> float | None:
        """Requests that keep the promise; None without one."""
        share = self.summary.slo_share
        return None if share is None else share * self.done_per_s


@dataclass(frozen=True, slots=True)
class Sweep:
    """`capacity` is requests a second; None when even the highest rate tried was kept up with."""

    points: tuple[Point, ...]
    capacity: float | None

    @property
    def last(self) -> Point:
        """The run that told the capacity, of the highest rate."""
        return self.points[-1]

    @property
    def best_goodput(self) -> Point | None:
        """The point that keeps the most promises a second; None when none were made."""
        kept = [p for p in self.points if p.goodput_per_s is not None]
        return max(kept, key=lambda p: p.goodput_per_s or 0.0, default=None)


Run = Callable[[float], Outcome]  # at so many requests a second


def sweep(run: Run, estimate: float, fractions: Sequence[float] = FRACTIONS) -> Sweep:
    """Find the capacity, of which `estimate` is one, then run at `fractions` of it.

    The run that told the capacity is the last point.
    """
    *_, last = sweeping(run, estimate, fractions)
    return last


def sweeping(run: Run, estimate: float, fractions: Sequence[float] = FRACTIONS) -> Iterator[Sweep]:
    """The same, as far as it has come, after each run."""
    check_rate(estimate)
    probes: list[Point] = []
    for probe in find_capacity(run, estimate):
        probes.append(probe)
        yield Sweep((probe,), probe.capacity)
    last = next((p for p in reversed(probes) if p.is_saturated), probes[-1])
    yield Sweep((last,), last.capacity)
    top, points = last.capacity or last.rate, list[Point]()
    for rate in (f * top for f in fractions if f * top < last.rate):
        points.append(_point(rate, run(rate), last.capacity))
        yield Sweep((*sorted(points, key=lambda p: p.rate), last), last.capacity)


def find_capacity(run: Run, estimate: float) -> Iterator[Point]:
    """Runs in search of the capacity; the last saturated one tells it.

    A run that keeps up says that the capacity is higher: twice the rate is tried. One far above it
    gives an estimate, and the next is made not far above that.
    """
    rate = OVERLOAD * estimate
    for _ in range(MAX_PROBES):
        yield (point := _point(rate, run(rate)))
        if point.capacity is None:
            rate *= 2
        elif CLOSE_TO_IT[0] <= rate / point.capacity <= CLOSE_TO_IT[1]:
            break
        else:
            rate = OVERLOAD * point.capacity


def _point(rate: float, outcome: Outcome, known: float | None = None) -> Point:
    """`known`: the capacity, where it has been found already."""
    requests = outcome.requests
    found = ttft_slope(requests)
    if found is None:
        raise ConfigError(
            f"{len(requests)} requests are too few to tell whether they are kept up with; "
            f"ask for at least {round(LEAST_REQUESTS / (1 - WARM_UP_SHARE)) + 1}"
        )
    capacity = capacity_seen(requests) if is_saturated(requests) else None
    if known is not None and rate > known:
        capacity = known  # a run as short as this may still be filling up
    done = capacity or arrival_rate(requests)
    num_tokens = sum(r.num_output for r in requests if r.is_finished)
    tokens_per_s = done * num_tokens / max(1, outcome.summary.num_finished)
    return Point(rate, outcome.summary, done, tokens_per_s, found, capacity)


def arrival_rate(requests: Sequence[RequestTimeline]) -> float:
    """Requests a second that really came after the warm-up; chance makes it differ from the rate
    that was asked for."""
    start, end = settled_window(requests)
    return (len(settled(requests)) - 1) / (end - start)


def settled_window(requests: Sequence[RequestTimeline]) -> tuple[float, float]:
    """From the end of the warm-up to the last arrival, in seconds."""
    points = settled(requests)
    return points[0][0], points[-1][0]
