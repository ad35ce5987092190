"""What happened in a run, and what do its times amount to? Times of tokens, and their summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class JobTimes:
    """Seconds of one clock. `due_s` is when the request was meant to arrive, not when it did,
    so that a stalled engine cannot hide the wait of those behind it."""

    due_s: float
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.token_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between neighbouring tokens: the inter-token latencies."""
        return [b - a for a, b in pairwise(self.token_s)]


@dataclass(slots=True)
class StepSeen:
    """One step: when it was collected, how many tokens it gave, and to how many requests.

    `bytes` is what it had to move by its price (None: nobody priced it). `drafts`: it made guesses
    before it checked them; what that reads is in no price."""

    ended_s: float
    num_tokens: int
    num_rows: int = 0
    bytes: float | None = None
    drafts: bool = False


@dataclass(slots=True)
class Run:
    """One run, by steps and by jobs."""

    started_s: float
    ended_s: float = 0.0
    steps: list[StepSeen] = field(default_factory=list)
    jobs: list[JobTimes] = field(default_factory=list)
    most_running: int = 0
    failed: int = 0

    @property
    def wall_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def num_tokens(self) -> int:
        return sum(len(job.token_s) for job in self.jobs)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """How some durations are spread, in milliseconds."""

    p50: float
    p90: float
    p99: float
    mean: float


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest of the sorted values; 0 for none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread_ms(seconds: Sequence[float]) -> Spread:
    """Percentiles and mean in milliseconds of durations in seconds."""
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    p50, p90, p99 = (percentile(seconds, share) * 1e3 for share in (0.5, 0.9, 0.99))
    return Spread(p50, p90, p99, mean * 1e3)


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps that followed each other without a break: seconds from the end of the one before them
    to their own end, and what they gave and moved meanwhile."""

    seconds: float
    num_steps: int
    num_tokens: int
    bytes: float | None
    drafts: bool

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_s(self) -> float | None:
        if self.bytes is None or self.seconds <= 0:
            return None
        return self.bytes / self.seconds

    @property
    def bytes_per_step(self) -> float | None:
        return None if self.bytes is None else self.bytes / self.num_steps

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps


def pace_of(began_s: float, steps: Sequence[StepSeen]) -> Pace:
    """Of at least one step; `began_s` is when the device was done with the one before."""
    known = [step.bytes for step in steps if step.bytes is not None]
    return Pace(
        steps[-1].ended_s - began_s,
        len(steps),
        sum(step.num_tokens for step in steps),
        sum(known) if len(known) == len(steps) else None,
        any(step.drafts for step in steps),
    )


def steady_steps(steps: Sequence[StepSeen], batch: int) -> Sequence[StepSeen]:
    """The longest run of consecutive steps that gave every one of `batch` requests a token, or
    several where guesses were right: decode alone, without the steps in which the batch fills or
    empties."""
    best, start = range(0), 0
    for index, step in enumerate(steps):
        if step.num_rows != batch:
            start = index + 1
        elif index + 1 - start > len(best):
            best = range(start, index + 1)
    return steps[best.start : best.stop]
