"""What may a policy decide? The order, the budget, whom to turn away, how many drafts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ridgeline.errors import RequestFault
from ridgeline.figures import seconds
from ridgeline.request import Request
from ridgeline.step import ScheduledRequest, StepPricer, StepShape

Rank = tuple[float, ...]
InFlight = tuple[ScheduledRequest, Request, int]  # who computes what in a step, in which epoch


@dataclass(frozen=True, slots=True)
class Admit:
    """Let it wait for its turn."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Turn it away; it may be worth asking again after `retry_after_s` seconds."""

    retry_after_s: float
    because: str = "too much work is waiting"


class Overloaded(RequestFault):
    """A policy turned the request away. `retry_after_s`: when to ask again, in seconds."""

    def __init__(self, refusal: Refuse) -> None:
        super().__init__(
            f"{refusal.because}; try again in {seconds(refusal.retry_after_s)}",
            code="overloaded",
            retry_after_s=refusal.retry_after_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySetting:
    """What the engine around a policy is like, and what was promised to its users: a first token
    within `ttft_slo_s`, then one every `tpot_slo_s`. `pricer` says how long a step takes."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_cache_tokens: int
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    pricer: StepPricer | None = None


class Policy:
    """Defaults for everything but `rank`. Ties are broken by order of arrival.

    `rank_is_fixed` promises that `rank` depends neither on `now` nor on how far the request has got
    and saves sorting at each step.

    A policy may keep requests in lanes (its `lane`; else all are in one): those of a lane are in
    the order of their ranks, and the lanes in that of `lane_rank`, which is asked at each step.
    """

    rank_is_fixed = False
    needs_promise = False  # of a time to the first token and of a time per token
    has_priorities = False  # heeds the priority of a request
    wants_prices = False  # of steps, where there are any

    @classmethod
    def make(cls, setting: PolicySetting) -> Self:
        """The policy for one engine. Raises ConfigError for a setting that it cannot work with."""
        return cls()

    def rank(self, request: Request, now: float) -> Rank:
        """Sort key. The smallest is served first; the largest is preempted first."""
        return (request.arrival_time,)

    def token_budget(self, running: Collection[Request], now: float) -> int | None:
        """Most tokens for the next step; None: as many as configured (never more, at least 1)."""
        return None

    def admit(self, request: Request, now: float) -> Admit | Refuse:
        """Asked once, when a request comes in."""
        return Admit()

    def num_drafts(self, request: Request, shape: StepShape) -> int | None:
        """Drafts to verify in a step that has `shape` so far; None: all there are."""
        return None

    def lane(self, request: Request) -> bytes:
        """Never another one for the same request."""
        return b""

    def lane_rank(self, lane: bytes) -> Rank:
        """The lane with the smallest is served first."""
        return ()

    def on_line(self, lane: bytes, waiting: Iterable[bytes]) -> None:
        """Somebody of this lane waits now, and nobody did before; `waiting` are the others."""

    def on_take(self, request: Request) -> None:
        """It waited, and is part of the step that is being planned."""

    def on_plan(self, in_flight: Sequence[InFlight]) -> None:
        """A step was planned: who computes what in it."""

    def on_end(self, request: Request) -> None:
        """It is over; `admit` had let it in."""

    def yields(self, lane: bytes, needs: float, held: Mapping[bytes, float]) -> bytes | None:
        """Who waits first, of this lane, finds no room: the lane whose newest request makes way;
        None: nobody's. `held` is the share of the engine, of its seats or of its cache, that each
        lane holds, and `needs` that of who waits."""
        return None
