"""Lower number first, and one number is worth a minute of waiting, so that nobody starves."""

from __future__ import annotations

from ridgeline.request import Request
from ridgeline.scheduler.policies.base import Policy, Rank

AGING_S = 60.0  # a request that came this much earlier goes before one of the next better number


class Priority(Policy):
    """Orders by priority * aging_s - (time waited). As all wait equally fast, `now` cancels out and
    the order of two requests never changes."""

    rank_is_fixed = True
    has_priorities = True

    def __init__(self, aging_s: float = AGING_S) -> None:
        self.aging_s = aging_s

    def rank(self, request: Request, now: float) -> Rank:
        return (request.priority * self.aging_s + request.arrival_time,)
