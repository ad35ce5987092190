"""Who has waited too long? One look at all open requests, a few times a second."""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.server.config import Limits
from ridgeline.server.errors import ApiError
from ridgeline.server.live import Live

PERIOD_S = 0.25


def enforce(lives: Iterable[Live], limits: Limits, now: float) -> None:
    """Fail, cut off or nudge what is over its time. `now` is the clock of `live.arrival`."""
    for live in list(lives):
        if live.error is None:
            _enforce_wait(live, limits, now)
        if live.sending_since is not None:
            if now - live.sending_since > limits.write_timeout_s and live.cut is not None:
                live.cut()
        elif now - live.last_sent > limits.keepalive_s and live.started:
            live.keep_alive()


def _enforce_wait(live: Live, limits: Limits, now: float) -> None:
    waited = now - live.arrival
    if not live.started and not live.answered and waited > limits.queue_timeout_s:
        live.fail(
            ApiError("queue_timeout", f"not started within {limits.queue_timeout_s:g} s; try later")
        )
    elif waited > limits.run_timeout_s:
        live.fail(ApiError("deadline_exceeded", f"not finished within {limits.run_timeout_s:g} s"))
