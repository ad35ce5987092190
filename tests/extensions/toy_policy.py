"""A scheduling policy from outside: the request with the fewest tokens left goes first."""

from __future__ import annotations

from collections.abc import Collection

from ridgeline.request import Request
from ridgeline.scheduler.policies.base import Admit, Policy, Rank, Refuse
from ridgeline.step import StepShape

MAX_ANSWER = 1000


class ShortestFirst(Policy):
    """Its ranks change as requests grow, it halves the budget when crowded, verifies one draft at
    most and turns very long answers away."""

    def rank(self, request: Request, now: float) -> Rank:
        return (request.max_num_tokens - len(request.token_ids), request.arrival_time)

    def token_budget(self, running: Collection[Request], now: float) -> int | None:
        return 4 if len(running) > 2 else None

    def admit(self, request: Request, now: float) -> Admit | Refuse:
        if (request.sampling.max_tokens or 0) > MAX_ANSWER:
            return Refuse(2.5, "long answers are served at night")
        return Admit()

    def num_drafts(self, request: Request, shape: StepShape) -> int | None:
        return 1
