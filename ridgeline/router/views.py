"""What does a router see? The request to place, and each replica as it was last heard of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Rng(Protocol):
    """The part of random.Random that routers use."""

    def randrange(self, stop: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request before it has a replica."""

    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica at the moment of choice.

    `num_pending_tokens` are prompt tokens that it took on and has not computed yet.
    `num_cached_tokens` is how much of this very request's prompt its prefix cache is thought to
    hold. One that is not `is_ready` (starting, draining, lost) gets nothing.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pending_tokens: int = 0
    num_cached_tokens: int = 0
    is_ready: bool = True

    @property
    def num_requests(self) -> int:
        return self.num_running + self.num_waiting

    @property
    def load(self) -> tuple[int, int]:
        """Requests count first: each of them shares every step from now on. Tokens break ties."""
        return self.num_requests, self.num_pending_tokens
