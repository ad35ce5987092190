"""Which replica gets this request? Pure choices over views; no state, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ridgeline.clock import Rng
from ridgeline.errors import RidgelineError, check


class NoReplica(RidgelineError):
    """Nobody is ready to take a request."""


class RouterPolicy(Protocol):
    def choose(self, request: RequestView, replicas: Sequence[ReplicaView], rng: Rng) -> int:
        """Index of the replica to send it to. Raises NoReplica when none is ready."""
        ...


def ready(replicas: Sequence[ReplicaView]) -> list[int]:
    found = [index for index, replica in enumerate(replicas) if replica.is_ready]
    if not found:
        raise NoReplica(f"none of the {len(replicas)} replicas is ready")
    return found


def _pick(candidates: Sequence[int], rng: Rng) -> int:
    return candidates[rng.randrange(len(candidates))]


def _least_loaded(candidates: Sequence[int], replicas: Sequence[ReplicaView], rng: Rng) -> int:
    """Ties are broken by chance, so that routers side by side do not all pick the same one."""
    least = min(replicas[index].load for index in candidates)
    return _pick([index for index in candidates if replicas[index].load == least], rng)


@dataclass(frozen=True, slots=True)
class Random:
    """Anyone, with equal chance."""

    def choose(self, request: RequestView, replicas: Sequence[ReplicaView], rng: Rng) -> int:
        return _pick(ready(replicas), rng)


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The least loaded of `sample` different ones taken by chance; None looks at all."""

    sample: int | None = None

    def __post_init__(self) -> None:
        check(self.sample is None or self.sample >= 1, "at least one is looked at")

    def choose(self, request: RequestView, replicas: Sequence[ReplicaView], rng: Rng) -> int:
        candidates = ready(replicas)
        while self.sample is not None and len(candidates) > self.sample:
            candidates.pop(rng.randrange(len(candidates)))
        return _least_loaded(candidates, replicas, rng)


@dataclass(frozen=True, slots=True)
class TwoChoices(LeastLoaded):
    """The less loaded of two taken by chance.

    Two are enough to keep the longest queue short (Mitzenmacher, "The Power of Two Choices in
    Randomized Load Balancing", 2001), and are safer when views are old: routers that all see the
    same minimum would all send there.
    """

    sample: int | None = 2


@dataclass(frozen=True, slots=True)
class PrefixAware:
    """The one that has most of the prompt in its prefix cache, unless it is overloaded.

    Overloaded: it has more than `max_ratio` times the requests of the least loaded one and at
    least `min_excess` more. Then, and when nobody has `min_share` of the prompt, the least loaded
    one is taken: it computes the prefix and has it from then on, so a hot prefix spreads.
    """

    max_ratio: float = 1.5
    min_excess: int = 8
    min_share: float = 0.1

    def choose(self, request: RequestView, replicas: Sequence[ReplicaView], rng: Rng) -> int:
        candidates = ready(replicas)
        least = min(replicas[index].num_requests for index in candidates)
        calm = [i for i in candidates if not self._is_overloaded(replicas[i].num_requests, least)]
        longest = max(replicas[index].num_cached_tokens for index in calm)
        if longest < max(1.0, self.min_share * request.num_prompt_tokens):
            return _least_loaded(candidates, replicas, rng)
        best = [index for index in calm if replicas[index].num_cached_tokens == longest]
        return _least_loaded(best, replicas, rng)

    def _is_overloaded(self, num_requests: int, least: int) -> bool:
        return num_requests > self.max_ratio * least and num_requests - least >= self.min_excess


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The one with the least predicted time to the first token.

    What is in the cache there, what waits and how fast steps are count as seconds, so nothing need
    be weighed against each other. Predictions within `tie` of the least are equal: then the longest
    prefix wins, and after it chance.
    """

    tie: float = 0.05

    def choose(self, request: RequestView, replicas: Sequence[ReplicaView], rng: Rng) -> int:
        times = {i: replicas[i].first_token_s(request.num_prompt_tokens) for i in ready(replicas)}
        limit = min(times.values()) * (1 + self.tie)
        candidates = [index for index, seconds in times.items() if seconds <= limit]
        longest = max(replicas[index].num_cached_tokens for index in candidates)
        return _pick([i for i in candidates if replicas[i].num_cached_tokens == longest], rng)


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request before it has a replica."""

    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica at the moment of choice.

    `num_pending_tokens` are prompt tokens that it took on and has not computed yet.
    `num_cached_tokens` is how much of this very request's prompt its prefix cache is thought to
    hold. One that is not `is_ready` (starting, draining, lost) gets nothing. It reads
    `prompt_tokens_per_s` beside what it decodes now, `step_s` is a step of that, and `slot_wait_s`
    passes until one of its slots is free.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pending_tokens: int = 0
    num_cached_tokens: int = 0
    is_ready: bool = True
    prompt_tokens_per_s: float = 1000.0
    step_s: float = 0.02
    slot_wait_s: float = 0.0

    @property
    def num_requests(self) -> int:
        return self.num_running + self.num_waiting

    @property
    def load(self) -> tuple[int, int]:
        """Requests count first: each of them shares every step from now on. Tokens break ties."""
        return self.num_requests, self.num_pending_tokens

    def first_token_s(self, num_prompt_tokens: int) -> float:
        """Seconds until a prompt of this length would have its first token. At least one token of
        it is always computed."""
        wait_s = max(self.slot_wait_s, self.num_pending_tokens / self.prompt_tokens_per_s)
        to_read = max(1, num_prompt_tokens - self.num_cached_tokens)
        return wait_s + to_read / self.prompt_tokens_per_s + self.step_s
