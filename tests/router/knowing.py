"""A policy that knows of caches what a router can: what it sent there itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.clock import Rng
from ridgeline.router.policies import ReplicaView, RequestView, RouterPolicy
from ridgeline.router.prefixes import Prefixes
from ridgeline.simulator.workload import HASH_BLOCK_TOKENS, Workload


class Knowing:
    """`policy` behind the table of prefixes; requests come in the order of `work`, none twice. One
    piece of a prompt is one of its hash blocks."""

    def __init__(self, policy: RouterPolicy, work: Workload, num_replicas: int) -> None:
        self._policy = policy
        self._work = iter(work)
        self._known = [Prefixes(1 << 20) for _ in range(num_replicas)]

    def choose(self, request: RequestView, replicas: Sequence[ReplicaView], rng: Rng) -> int:
        hashes = next(self._work).prefix_hashes
        names = tuple(repr(hashes[: end + 1]).encode() for end in range(len(hashes)))
        views = [
            replace(view, num_cached_tokens=known.held(names) * HASH_BLOCK_TOKENS)
            for view, known in zip(replicas, self._known, strict=True)
        ]
        chosen = self._policy.choose(request, views, rng)
        self._known[chosen].send(names)
        return chosen
