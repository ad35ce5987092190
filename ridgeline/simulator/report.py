"""What do a run's timelines amount to? Percentiles, goodput under a promise, use of the machine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import msgspec

from ridgeline.errors import ConfigError

MAX_POINTS = 400  # of a curve over time that is printed or drawn


@dataclass(slots=True)
class RequestTimeline:
    """When what happened to one request, in seconds of the simulated clock; None: it never did.

    `refused` says why the engine would not take it or gave it up.
    """

    id: str
    arrival_s: float
    num_input: int
    num_output: int
    replica: int = 0
    started_s: float | None = None  # first scheduled
    first_token_s: float | None = None
    finished_s: float | None = None
    num_cached: int = 0
    num_preemptions: int = 0
    refused: str = ""
    num_retries: int = 0  # after its replica was lost
    read_by: int | None = None  # another replica, which read its prompt

    @property
    def is_finished(self) -> bool:
        return self.finished_s is not None and not self.refused

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.arrival_s

    @property
    def queue_s(self) -> float | None:
        return None if self.started_s is None else self.started_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for an answer of one token, which has none."""
        if self.finished_s is None or self.first_token_s is None or self.num_output < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.num_output - 1)

    def as_json(self) -> dict[str, Any]:
        times = {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "e2e_s": self.e2e_s}
        return asdict(self) | times


class StepSample(msgspec.Struct, frozen=True, gc=False):
    """`num_steps` equal steps (several when they were advanced at once) of one replica.

    Requests, tokens and blocks are as they stood when the last of them was over; `num_rows` is how
    many requests each step computed for.
    """

    start_s: float
    end_s: float
    num_steps: int
    num_rows: int
    num_tokens: int  # computed in all these steps
    num_running: int
    num_waiting: int
    num_used_blocks: int
    replica: int = 0


# ---------------------------------------------------------------------- spread


@dataclass(frozen=True, slots=True)
class Spread:
    """In the unit of the values; all None when there are none."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest of at least one sorted value."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Iterable[float | None]) -> Spread:
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return Spread(None, None, None, None, None, None)
    p50, p90, p95, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99))
    return Spread(sum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


# ---------------------------------------------------------------------- promises


@dataclass(frozen=True, slots=True)
class Slo:
    """What every request is promised, in seconds; None: nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"the promised {name} is {value:g} s; it must be above 0")

    @property
    def is_given(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def is_kept(self, request: RequestTimeline) -> bool:
        """An answer of one token keeps any TPOT. One that never finished keeps nothing."""
        if not request.is_finished:
            return False
        pairs = ((request.ttft_s, self.ttft_s), (request.tpot_s, self.tpot_s))
        return all(got is None or limit is None or got <= limit for got, limit in pairs)


# ---------------------------------------------------------------------- summary


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers. Shares are 0 to 1; what cannot be said is None.

    `goodput` is requests a second that kept the promise, None without one. `busy_share` is the time
    with a step running; `slot_share` the share of places (`num_slots` per replica) that a request
    filled in those steps.
    """

    num_requests: int
    num_finished: int
    num_refused: int
    duration_s: float
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    queue_s: Spread
    goodput_per_s: float | None
    slo_share: float | None
    num_steps: int
    num_preemptions: int
    num_retries: int
    mean_in_flight: float
    busy_share: float
    slot_share: float
    num_idle_slot_steps: int
    kv_mean_share: float
    kv_max_share: float
    cached_share: float
    usd_per_million_output: float | None = None
    usd_per_million_tokens: float | None = None


def summarize(
    requests: Sequence[RequestTimeline],
    steps: Sequence[StepSample],
    *,
    num_slots: int,
    num_blocks: int,
    num_replicas: int = 1,
    slo: Slo | None = None,
    usd_per_hour: float | None = None,
) -> Summary:
    """`num_slots` and `num_blocks` are of one replica, `usd_per_hour` is of them all."""
    done = [r for r in requests if r.is_finished]
    start = min((r.arrival_s for r in requests), default=0.0)
    end = max((*(s.end_s for s in steps), *(r.finished_s or 0.0 for r in done)), default=start)
    duration = max(0.0, end - start)
    kept = sum(slo.is_kept(r) for r in requests) if slo and slo.is_given else None
    num_input, num_output = sum(r.num_input for r in done), sum(r.num_output for r in done)
    busy = sum(s.end_s - s.start_s for s in steps)
    num_steps, rows = sum(s.num_steps for s in steps), sum(s.num_rows * s.num_steps for s in steps)
    used = [sum(blocks) for _, *blocks in used_blocks(steps, num_replicas)]
    paid = None if usd_per_hour is None else usd_per_hour * duration / 3600
    return Summary(
        num_requests=len(requests),
        num_finished=len(done),
        num_refused=sum(bool(r.refused) for r in requests),
        duration_s=duration,
        requests_per_s=_over(len(done), duration),
        input_tokens_per_s=_over(num_input, duration),
        output_tokens_per_s=_over(num_output, duration),
        ttft_s=spread(r.ttft_s for r in requests),
        tpot_s=spread(r.tpot_s for r in done),
        e2e_s=spread(r.e2e_s for r in done),
        queue_s=spread(r.queue_s for r in requests),
        goodput_per_s=None if kept is None else _over(kept, duration),
        slo_share=None if kept is None else _over(kept, len(requests)),
        num_steps=num_steps,
        num_preemptions=sum(r.num_preemptions for r in requests),
        num_retries=sum(r.num_retries for r in requests),
        mean_in_flight=_over(sum(r.e2e_s or 0.0 for r in done), duration),
        busy_share=_over(busy, duration * num_replicas),
        slot_share=_over(rows, num_steps * num_slots),
        num_idle_slot_steps=num_steps * num_slots - rows,
        kv_mean_share=_over(
            sum(s.num_used_blocks * (s.end_s - s.start_s) for s in steps), busy * num_blocks
        ),
        kv_max_share=_over(max(used, default=0), num_blocks * num_replicas),
        cached_share=_over(sum(r.num_cached for r in done), num_input),
        usd_per_million_output=_per_million(paid, num_output),
        usd_per_million_tokens=_per_million(paid, num_input + num_output),
    )


def _over(amount: float, whole: float) -> float:
    return amount / whole if whole > 0 else 0.0


def _per_million(usd: float | None, num_tokens: int) -> float | None:
    return None if usd is None or num_tokens == 0 else usd / num_tokens * 1e6


# ---------------------------------------------------------------------- over time


def used_blocks(steps: Sequence[StepSample], num_replicas: int) -> Iterator[tuple[float, ...]]:
    """(time, blocks in use on each replica) whenever one of them ended a step, in order."""
    now = [0] * num_replicas
    for step in sorted(steps, key=lambda s: s.end_s):
        now[step.replica] = step.num_used_blocks
        yield (step.end_s, *now)


def phases(
    requests: Sequence[RequestTimeline], times: Sequence[float]
) -> tuple[list[int], list[int], list[int]]:
    """Requests that wait, read their prompts, and are answered, at each time."""
    came, began, first, ended = (
        sorted(moment for moment in moments if moment is not None)
        for moments in zip(
            *((r.arrival_s, r.started_s, r.first_token_s, r.finished_s) for r in requests),
            strict=True,
        )
    )
    at = [[bisect_right(moments, t) for t in times] for moments in (came, began, first, ended)]
    waiting, prefill, decode = (
        [a - b for a, b in zip(one, other, strict=True)] for one, other in pairwise(at)
    )
    return waiting, prefill, decode


def mean_in_system(requests: Sequence[RequestTimeline], start_s: float, end_s: float) -> float:
    """Requests that have arrived and not finished, averaged over the time from start to end."""
    inside = 0.0
    for r in requests:
        gone = end_s if r.finished_s is None else min(r.finished_s, end_s)
        inside += max(0.0, gone - max(r.arrival_s, start_s))
    return _over(inside, end_s - start_s)


def thinned(rows: Sequence[Any], most: int = MAX_POINTS) -> list[Any]:
    """At most `most` of them, evenly spaced, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]
