"""How long do users wait? Queue, first token, between tokens and the whole, per request;
and how much comes in and goes out."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.errors import check

# Seconds. Wide enough for a small model on a GPU and for a large one on a CPU.
FIRST_TOKEN_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
BETWEEN_TOKENS_S = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0,
    5.0,
)  # fmt: skip
WHOLE_REQUEST_S = (
    0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip


@dataclass(slots=True)
class SequenceTimes:
    """When what happened to one sequence, in seconds of one monotonic clock; None: not yet.
    `queued`: it was handed to the engine; never for a fork, which waits for the prompt of another
    sequence of its request and not for room."""

    arrival: float
    queued: float | None = None
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0


class Latency:
    """Four histograms in seconds, fed by whoever sees the events."""

    def __init__(self) -> None:
        self.queue = Histogram(FIRST_TOKEN_S)
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.between_tokens = Histogram(BETWEEN_TOKENS_S)
        self.whole_request = Histogram(WHOLE_REQUEST_S)

    def on_start(self, times: SequenceTimes, now: float) -> None:
        """The plan made at `now` computes the sequence for the first time; later calls change
        nothing."""
        if times.started is None:
            times.started = now
            if times.queued is not None:
                self.queue.observe(now - times.queued)

    def on_tokens(self, times: SequenceTimes, count: int, now: float) -> None:
        """`count` tokens arrived together; their gap is shared out evenly."""
        if count <= 0:
            return
        times.num_tokens += count
        if times.last_token is None:
            self.first_token.observe(now - times.arrival)
            count -= 1  # the tokens that came along with the first waited for nothing
            times.first_token = times.last_token = now
        if count:
            self.between_tokens.observe((now - times.last_token) / count, count)
        times.last_token = now

    def on_end(self, times: SequenceTimes, now: float) -> None:
        self.whole_request.observe(now - times.arrival)


class Histogram:
    """Counts of values per bound; bucket i holds bounds[i-1] < value <= bounds[i]."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        check(list(bounds) == sorted(set(bounds)), "histogram bounds rise")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last is above every bound
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`; a negative one (a clock's fault) counts as zero."""
        value = max(0.0, value)
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def quantiles_since(
        self, counts: Sequence[int], shares: Sequence[float]
    ) -> tuple[float | None, ...]:
        """Of the values since the counts were these: at most that large are so many of them, as
        straight lines through the buckets say. None: there were none."""
        since = [new - old for new, old in zip(self.counts, counts, strict=True)]
        edges = (0.0, *self.bounds, self.bounds[-1])
        found: list[float | None] = []
        for share in shares:
            left, value = share * sum(since), None
            for low, high, num in zip(edges[:-1], edges[1:], since, strict=True):
                if num and left <= num:
                    value = low + (high - low) * left / num
                    break
                left -= num
            found.append(value)
        return tuple(found)

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, values at or below it) per bucket, "+Inf" last."""
        total, rows = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, total))
        return rows


@dataclass(slots=True)
class Traffic:
    """All counts only rise. `finished` is by finish reason, `refused` by error code.

    Both have few keys by construction: reasons and codes are ours, never the client's words.
    """

    num_requests: int = 0
    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_late_outputs: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def accepted(self, num_sequences: int, num_prompt_tokens: int) -> None:
        self.num_requests += 1
        self.num_sequences += num_sequences
        self.num_prompt_tokens += num_prompt_tokens
