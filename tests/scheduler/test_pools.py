"""Which pool is a request served out of, and who makes room for it there?"""

from __future__ import annotations

from functools import partial

from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.block_pools import open_pools
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import StepPlan, StepResult

SIZE = 2


def scheduler_of(num_blocks: int) -> Scheduler:
    """Of two pools."""
    blocks = open_pools(partial(BlockManager, num_blocks, SIZE, key=b"k"), 2, 64)
    return Scheduler(blocks, FCFS(), 64, 8)


def add(scheduler: Scheduler, name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    request = Request(name, prompt, SamplingParams(max_tokens=max_tokens), 0.0)
    scheduler.add(request, 0.0)
    return request


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    sampled: dict[str, tuple[int, ...]] = {
        entry.request_id: (7,) for entry in plan.scheduled if entry.samples
    }
    scheduler.update(plan, StepResult(sampled))
    scheduler.check_invariants()
    return plan


def test_requests_go_where_least_is_read_before_them() -> None:
    scheduler = scheduler_of(40)
    long = add(scheduler, "long", tuple(range(10, 22)), 4)
    short = add(scheduler, "short", (1, 2), 4)
    other = add(scheduler, "other", (3, 4), 4)
    plan = step(scheduler)
    assert (long.pool, short.pool, other.pool) == (0, 1, 1)
    assert [new.pool for new in plan.new] == [0, 1, 1]


def test_a_cached_prefix_draws_a_request_to_its_pool() -> None:
    scheduler = scheduler_of(40)
    first = add(scheduler, "first", tuple(range(10, 22)), 2)
    add(scheduler, "beside", (1, 2), 2)
    for _ in range(2):
        step(scheduler)
    assert not scheduler.requests
    add(scheduler, "here", (5, 6), 8)  # on the first pool, as all are empty
    step(scheduler)
    again = add(scheduler, "again", (*range(10, 20), 30, 31), 2)
    step(scheduler)
    assert (again.pool, again.num_cached_tokens) == (first.pool, 10)


def test_room_is_made_by_rows_of_the_same_pool() -> None:
    """The youngest of all is in the other pool, where its blocks are of no use to the first."""
    scheduler = scheduler_of(6)
    old, middle, young, last = (
        add(scheduler, name, (n, n + 1), 11) for n, name in enumerate(("a", "b", "c", "d"))
    )
    step(scheduler)
    assert [row.pool for row in (old, middle, young, last)] == [0, 1, 0, 1]
    scheduler.finish("b")
    while not scheduler.num_preemptions:
        step(scheduler)
    assert (young.num_preemptions, last.num_preemptions) == (1, 0)


def test_a_pool_without_room_is_passed_over() -> None:
    scheduler = scheduler_of(6)
    for name, prompt in (("a", tuple(range(10, 19))), ("b", (1, 2)), ("c", (3, 4))):
        add(scheduler, name, prompt, 2 if name == "a" else 6)
    scheduler.schedule(0.0)
    late = add(scheduler, "late", tuple(range(20, 23)), 2)  # the first pool has less to read
    scheduler.schedule(0.0)
    assert late.pool == 1
    assert late.block_ids


def test_what_a_failed_step_was_to_fill_is_found_in_no_pool() -> None:
    scheduler = scheduler_of(12)
    prompts = {"a": tuple(range(10, 19)), "b": tuple(range(20, 29))}
    for name, prompt in prompts.items():
        add(scheduler, name, prompt, 2)
    scheduler.schedule(0.0)
    assert len(scheduler.fail_in_flight("on purpose")) == 2
    again = [add(scheduler, f"{name} again", prompt, 2) for name, prompt in prompts.items()]
    step(scheduler)
    assert [row.num_cached_tokens for row in again] == [0, 0]
