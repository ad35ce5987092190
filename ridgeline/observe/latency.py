"""How long do users wait? Queue, first token, between tokens and the whole, per request."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.observe.histogram import (
    BETWEEN_TOKENS_S,
    FIRST_TOKEN_S,
    WHOLE_REQUEST_S,
    Histogram,
)


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
