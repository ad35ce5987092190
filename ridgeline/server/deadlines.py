"""Who has waited too long, or would? One look at all open requests, a few times a second.

A wait is foretold from how fast the queue moves, and may be half or twice of that. `run_timeout_s`
counts from the first step, so that nobody pays for those before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.server.active_request import ActiveRequest
from ridgeline.server.config import Limits
from ridgeline.server.errors import ApiError

PERIOD_S = 0.25
PATIENCE = 2.0  # times what a wait was foretold to be
MEMORY = 0.99  # weight of what was known, after each step
LEAST_STEPS = 16
TYPICAL_ANSWER = 256.0  # tokens, until some have been seen
MOST_ANSWERS = 256  # that are remembered


class ServiceRate:
    """How fast the queue moves: what of late was made in a second while somebody waited, and how
    long answers were. Nothing is foretold before LEAST_STEPS such steps."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._tokens = self._seconds = 0.0  # decayed sums over steps
        self._answer = TYPICAL_ANSWER
        self._num_answers = 0
        self._last: float | None = None

    def on_step(self, now: float, num_tokens: int, *, is_full: bool) -> None:
        """A step is over that made so many tokens; `is_full`: somebody waits."""
        if is_full and self._last is not None:
            self._num_steps += 1
            self._tokens = MEMORY * self._tokens + num_tokens
            self._seconds = MEMORY * self._seconds + now - self._last
        self._last = now if is_full else None

    def on_end(self, num_tokens: int) -> None:
        self._num_answers = min(self._num_answers + 1, MOST_ANSWERS)
        self._answer += (num_tokens - self._answer) / self._num_answers

    def wait_s(self, num_before: int) -> float | None:
        """Seconds until those who wait have their turn; None: nobody knows."""
        if self._num_steps < LEAST_STEPS or not self._tokens:
            return None
        return num_before * self._answer * self._seconds / self._tokens

    @property
    def answer_tokens(self) -> float:
        """Of an average answer."""
        return self._answer

    def run_s(self, num_tokens: int) -> float:
        """Seconds of an answer of at most so many tokens, once it has begun."""
        step_s = self._seconds * (1 - MEMORY) / (1 - MEMORY**self._num_steps)
        return min(self._answer, num_tokens) * step_s


def enforce(lives: Iterable[ActiveRequest], limits: Limits, now: float, rate: ServiceRate) -> None:
    """Fail, cut off or nudge what is over its time. `now` is the clock of `live.arrival`."""
    for active in list(lives):
        if active.error is None:
            _enforce_wait(active, limits, now, rate)
        if active.sending_since is not None:
            if now - active.sending_since > limits.write_timeout_s and active.cut is not None:
                active.cut()
        elif now - active.last_sent > limits.keepalive_s and active.started:
            active.keep_alive()


def _enforce_wait(active: ActiveRequest, limits: Limits, now: float, rate: ServiceRate) -> None:
    waited = now - active.arrival
    if not active.started and not active.answered:
        if active.expected_wait_s is None:  # nothing was known when it came
            active.expected_wait_s = rate.wait_s(active.num_before)
        if waited > max(limits.queue_timeout_s, PATIENCE * (active.expected_wait_s or 0.0)):
            active.fail(ApiError("queue_timeout", f"not started within {waited:.0f} s; try later"))
            return
    most = limits.run_timeout_s
    if now - (active.arrival if active.began is None else active.began) > most:
        active.fail(ApiError("deadline_exceeded", f"not finished within {most:g} s"))


def check_wait(
    active: ActiveRequest, limits: Limits, rate: ServiceRate, num_before: int, num_tokens: int
) -> None:
    """Before the engine hears of it: `num_before` sequences wait, and an answer of it has
    `num_tokens` at most. Raises ApiError overloaded when it would surely wait for longer than
    `run_timeout_s` leaves it."""
    active.num_before = num_before
    active.expected_wait_s = wait_s = rate.wait_s(num_before)
    if wait_s is None:
        return
    late_s = wait_s / PATIENCE + rate.run_s(num_tokens) - limits.run_timeout_s
    if wait_s and late_s > 0:
        raise ApiError(
            "overloaded",
            f"it would wait about {wait_s:.0f} s for its first step, more than twice what is left "
            f"of --run-timeout-s ({limits.run_timeout_s:g} s); try again in {late_s:.0f} s",
            retry_after_s=late_s,
        )
