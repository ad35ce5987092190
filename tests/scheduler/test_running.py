"""Running requests are in the order of their ranks, however they came and went."""

from __future__ import annotations

import random

import pytest

from ridgeline.request import Request
from ridgeline.scheduler.policies.base import Policy, Rank
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.queue import RunningSet
from tests.scheduler.rig import make_request


class ByPriority(Policy):
    rank_is_fixed = True

    def rank(self, request: Request, now: float) -> Rank:
        return (request.priority,)


class Turning(Policy):
    def rank(self, request: Request, now: float) -> Rank:
        return ((request.priority + now) % 5,)


@pytest.mark.parametrize("policy", [FCFS(), ByPriority(), Turning()])
def test_order_is_that_of_ranks_then_of_arrival(policy: Policy) -> None:
    rng, running, present = random.Random(3), RunningSet(policy), list[Request]()
    for n in range(1, 400):
        now = float(n)
        if present and rng.random() < 0.45:
            gone = present.pop(rng.randrange(len(present)))
            assert running.discard(gone)
            assert not running.discard(gone)
        else:
            request = make_request(f"r{n}", 4)
            request.order, request.priority = n, rng.randrange(4)
            present.append(request)
            running.add(request)
        ranked = sorted((policy.rank(r, now), r.order) for r in present)
        assert [(rank, order) for rank, order, _ in running.in_order(now)] == ranked
        assert running.slots[b""] == len(running) == len(present)


def test_a_list_that_was_returned_never_changes() -> None:
    running = RunningSet(FCFS())
    first, second = make_request("a", 4), make_request("b", 4)
    first.order, second.order = 1, 2
    running.add(first)
    alone = running.in_order(0.0)
    running.add(second)
    both = running.in_order(0.0)
    running.discard(first)
    assert [r for _, _, r in alone] == [first]
    assert [r for _, _, r in both] == [first, second]
    assert [r for _, _, r in running.in_order(0.0)] == [second]
