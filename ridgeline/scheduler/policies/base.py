"""What may a policy decide? The order, the budget, whom to turn away, how many guesses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from ridgeline.errors import RequestFault
from ridgeline.figures import seconds
from ridgeline.request import Request
from ridgeline.step import StepPricer, StepShape

Rank = tuple[float, ...]


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
    """

    rank_is_fixed = False
    needs_promise = False  # of a time to the first token and of a time per token

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
        """Guesses to verify in a step that has `shape` so far; None: all there are."""
        return None
