"""Does the page of the heartbeat say which step the engine is at, to another mapping of it?"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ridgeline.observe.run import Run
from ridgeline.request import FinishReason, Request, RequestOutput, SamplingParams
from ridgeline.server.heartbeat import SEQUENCE, Heartbeat, HeartbeatPage, new_page
from ridgeline.step import ScheduledRequest, StepPlan, StepResult
from tests.observe.test_time_breakdown import price


@pytest.fixture
def page() -> Iterator[int]:
    fd = new_page()
    yield fd
    os.close(fd)


def plan(step_id: int, num_tokens: int) -> StepPlan:
    return StepPlan(step_id, (ScheduledRequest("a", 0, num_tokens, ((),), True),))


def pair(page: int, *, in_submit: bool) -> tuple[Run, Heartbeat, HeartbeatPage]:
    run = Run(price, computes_in_submit=in_submit)
    return run, Heartbeat(page, run), HeartbeatPage(page)


def test_two_steps_in_flight(page: int) -> None:
    run, heartbeat, reader = pair(page, in_submit=False)
    assert reader.read() is None
    first, second = plan(1, 8), plan(2, 1)
    for journal in (run, heartbeat):
        journal.on_add(Request("a", (1,), SamplingParams(), 0.0), 0.0, None)
        journal.on_plan(first, 10.0)
        journal.on_submitted(first, 10.1)
        journal.on_plan(second, 10.2)
    step = reader.read()
    assert step is not None
    assert (step.step_id, step.began, step.expected_s) == (1, 10.0, 9.0)
    output = RequestOutput("a", (5,), None)
    for journal in (run, heartbeat):
        journal.on_collect(first, StepResult({}), [output], None, 12.0)
    step = reader.read()
    assert step is not None
    assert (step.step_id, step.began, step.expected_s) == (2, 12.0, 2.0)
    for journal in (run, heartbeat):
        journal.on_collect(
            second, StepResult({}), [RequestOutput("a", (5,), FinishReason.LENGTH)], None, 13.0
        )
    assert reader.read() is None


def test_an_executor_that_computes_in_submit(page: int) -> None:
    """Nothing is priced before the step is computed, and one that takes long while it is."""
    run, heartbeat, reader = pair(page, in_submit=True)
    for journal in (run, heartbeat):
        journal.on_plan(plan(1, 8), 10.0)
    seen = heartbeat.show_long_step(None)
    assert reader.read() is None
    assert run._planned
    heartbeat.show_long_step(seen)
    step = reader.read()
    assert step is not None
    assert (step.step_id, step.began, step.expected_s) == (1, 10.0, 9.0)
    assert run._planned, "its price in the record is made when it is over"
    for journal in (run, heartbeat):
        journal.on_submitted(plan(1, 8), 19.0)
    assert reader.read() is None
    assert heartbeat.show_long_step(seen) is None
    assert reader.read() is None


def test_the_first_step_of_each_kind_is_told(page: int) -> None:
    """From before it is sent off, since kernels are compiled on the way, until it has ended."""
    _, heartbeat, reader = pair(page, in_submit=False)
    done = StepResult({})
    heartbeat.on_plan(StepPlan(1, ()), 9.0)  # nothing to do
    assert not reader.is_first_time()
    heartbeat.on_plan(plan(1, 8), 10.0)
    assert reader.is_first_time()
    heartbeat.on_plan(plan(2, 1), 10.0)
    heartbeat.on_collect(plan(1, 8), done, [], None, 11.0)
    assert reader.is_first_time()  # the second is of another kind
    heartbeat.on_collect(plan(2, 1), None, [], "out of memory", 12.0)
    assert not reader.is_first_time()
    heartbeat.on_plan(plan(3, 9), 13.0)
    assert not reader.is_first_time()
    heartbeat.on_plan(plan(4, 1), 13.0)  # the one before has not ended well
    assert reader.is_first_time()
    heartbeat.on_collect(plan(4, 1), done, [], None, 14.0)
    with heartbeat.first_time():
        assert reader.is_first_time()
    assert not reader.is_first_time()


def test_a_cpu_has_one_first_step(page: int) -> None:
    _, heartbeat, reader = pair(page, in_submit=True)
    heartbeat.on_plan(plan(1, 8), 10.0)
    assert reader.is_first_time()
    heartbeat.on_collect(plan(1, 8), StepResult({}), [], None, 11.0)
    heartbeat.on_plan(plan(2, 1), 12.0)
    assert not reader.is_first_time()


def test_a_page_that_is_being_written_is_not_believed(page: int) -> None:
    run, heartbeat, reader = pair(page, in_submit=False)
    for journal in (run, heartbeat):
        journal.on_plan(plan(1, 8), 10.0)
        journal.on_submitted(plan(1, 8), 10.1)
    assert reader.read() is not None
    odd = SEQUENCE.unpack_from(heartbeat._page, 0)[0] + 1
    SEQUENCE.pack_into(heartbeat._page, 0, odd)
    assert reader.read() is None
