"""First come, first served."""

from __future__ import annotations

from ridgeline.request import Request
from ridgeline.scheduler.policies.base import Policy, Rank


class FCFS(Policy):
    rank_is_fixed = True

    def rank(self, request: Request, now: float) -> Rank:
        return (request.arrival_time,)
