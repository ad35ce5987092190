"""The line is in the policy's order, and nobody stands in it for ever."""

from __future__ import annotations

import random

import pytest

from ridgeline.request import Request
from ridgeline.scheduler.policies.base import Policy, Rank
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.policies.priority import Priority
from ridgeline.scheduler.queue import WaitingQueue
from tests.scheduler.rig import make_request


class Newest(Policy):
    """Unfair: whoever came last goes first."""

    def rank(self, request: Request, now: float) -> Rank:
        return (-request.arrival_time,)


class Turning(Policy):
    def rank(self, request: Request, now: float) -> Rank:
        return ((request.order + int(now)) % 7,)


def arrive(queue: WaitingQueue, order: int, now: float = 0.0, **fields: object) -> Request:
    request = make_request(f"r{order}", **fields)  # type: ignore[arg-type]
    request.order = order
    queue.add(request, now)
    return request


def drain(queue: WaitingQueue, now: float = 0.0) -> list[int]:
    orders = []
    while (head := queue.head(now)) is not None:
        queue.take(head)
        orders.append(head.order)
    return orders


def test_first_come_first_served_and_ties_in_order_of_arrival() -> None:
    queue = WaitingQueue(FCFS())
    for order, arrival in enumerate((3.0, 1.0, 2.0, 1.0), 1):
        arrive(queue, order, arrival_time=arrival)
    assert drain(queue) == [2, 4, 3, 1]
    assert len(queue) == 0


def test_priority_ages() -> None:
    queue = WaitingQueue(Priority(aging_s=10.0))
    arrive(queue, 1, arrival_time=0.0, priority=1)
    arrive(queue, 2, arrival_time=9.0, priority=0)  # goes first: it came less than 10 s later
    arrive(queue, 3, arrival_time=11.0, priority=0)
    assert drain(queue) == [2, 1, 3]


def test_ranks_that_change_are_asked_again() -> None:
    queue = WaitingQueue(Turning())
    for order in range(1, 6):
        arrive(queue, order)
    firsts = {queue.head(float(now)) for now in range(7)}
    assert len(firsts) > 2


def test_the_oldest_is_passed_over_a_bounded_number_of_times() -> None:
    queue = WaitingQueue(Newest(), starvation_limit=5)
    oldest = arrive(queue, 1, arrival_time=0.0)
    taken = []
    for order in range(2, 20):
        arrive(queue, order, arrival_time=float(order))
        head = queue.head(0.0)
        assert head is not None
        queue.take(head)
        taken.append(head)
    assert taken.index(oldest) == 5


def test_one_that_comes_back_counts_as_the_oldest() -> None:
    queue = WaitingQueue(Newest(), starvation_limit=1)
    arrive(queue, 1)
    back = arrive(queue, 2, arrival_time=-1.0)
    queue.take(back)
    queue.put_back(back, 0.0)
    arrive(queue, 3, arrival_time=9.0)
    assert drain(queue)[:2] == [3, 2]


def test_leaving_is_safe_and_leaves_nothing() -> None:
    queue = WaitingQueue(FCFS())
    first, second = arrive(queue, 1), arrive(queue, 2)
    queue.discard(first)
    queue.discard(first)
    assert first not in queue
    assert second in queue
    queue.discard(second)
    assert queue.head(0.0) is None
    assert not queue._places
    assert not queue._by_age
    assert not queue._lines


@pytest.mark.parametrize("policy", [FCFS(), Priority(), Turning(), Newest()])
def test_against_a_plain_list(policy: Policy) -> None:
    seed = 5
    rng = random.Random(seed)
    queue, model = WaitingQueue(policy, starvation_limit=1 << 30), dict[int, Request]()
    for order in range(1, 400):
        now = float(order // 3)
        if rng.random() < 0.6:
            arrival, priority = rng.choice([0.0, now]), rng.randint(0, 2)
            fields = {"arrival_time": arrival, "priority": priority}
            model[order] = arrive(queue, order, now, **fields)
        elif model and rng.random() < 0.5:
            queue.discard(model.pop(rng.choice(list(model))))
        elif model:
            wanted = min(model.values(), key=lambda r: (policy.rank(r, now), r.order))
            head = queue.head(now)
            assert head is wanted, f"seed {seed}"
            queue.take(wanted)
            del model[wanted.order]
        assert len(queue) == len(model)
