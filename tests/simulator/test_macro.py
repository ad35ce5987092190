"""Passing over steps changes nothing: the same decisions, tables, hashes, tokens and times."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ridgeline.errors import RequestFault
from ridgeline.request import Request, RequestOutput, SamplingParams
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.simulator.executor import Answer
from ridgeline.simulator.simulation import Machine, Options, Simulation, SimulationReport
from ridgeline.simulator.workload import Arrival
from ridgeline.step import Listener, StepPlan, StepRecord, StepResult
from tests.scheduler.state import named, state_of
from tests.simulator.worlds import LinearPricer, World, draw_world, single
from tests.thinning import slow

NUM_CASES = int(os.environ.get("RIDGELINE_TEST_MACRO_CASES", "500"))
CASES_PER_TEST = 50
FIRSTS = range(0, NUM_CASES, CASES_PER_TEST)


class Diary(Listener):
    """Everything that a journal hears, and the scheduler's whole state at every arrival."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.entries: list[object] = []

    def on_add(self, request: Request, now: float, fault: RequestFault | None) -> None:
        self.entries.append(("add", request.request_id, now, str(fault), state_of(self.scheduler)))

    def on_abort(self, request_id: str, now: float) -> None:
        self.entries.append(("abort", request_id, now))

    def on_plan(self, plan: StepPlan, now: float) -> None:
        self.entries.append(("plan", now, named(plan)))

    def on_submitted(self, plan: StepPlan, now: float) -> None:
        self.entries.append(("submit", now, plan.step_id))

    def on_collect(
        self,
        plan: StepPlan,
        result: StepResult | None,
        outputs: Sequence[RequestOutput],
        error: str | None,
        now: float,
    ) -> None:
        self.entries.append(("collect", now, named(plan), result, tuple(outputs), error))


def live(world: World) -> tuple[SimulationReport, Diary, object]:
    diaries: list[Diary] = []

    def listener_of(number: int, scheduler: Scheduler) -> Diary:
        diaries.append(Diary(scheduler))
        return diaries[-1]

    simulation = Simulation(world.machine, (), world.options, listener_of=listener_of)
    report = simulation.run_jobs(world.jobs())
    scheduler = simulation.replicas[0].engine.scheduler
    scheduler.check_invariants()
    return report, diaries[0], state_of(scheduler)


def compare(world: World) -> SimulationReport:
    """Run it by leaps and step by step; returns the report of the leaps."""
    leaps, leap_diary, leap_end = live(world)
    steps, step_diary, step_end = live(single(world))
    assert steps.num_leaps == 0
    pairs = zip(leap_diary.entries, step_diary.entries, strict=False)
    for number, (mine, theirs) in enumerate(pairs):
        assert mine == theirs, f"seed {world.seed}: entry {number} differs"
    assert len(leap_diary.entries) == len(step_diary.entries), f"seed {world.seed}"
    assert leap_end == step_end, f"seed {world.seed}: the states at the end differ"
    assert leaps.requests == steps.requests, f"seed {world.seed}: the timelines differ"
    assert leaps.num_steps == steps.num_steps, f"seed {world.seed}"
    totals = [
        (
            sum(s.num_tokens for s in report.steps),
            sum(s.num_rows * s.num_steps for s in report.steps),
        )
        for report in (leaps, steps)
    ]
    assert totals[0] == totals[1], f"seed {world.seed}: the step samples differ"
    return leaps


@pytest.mark.parametrize("first", [*FIRSTS[::3], *slow(*FIRSTS[1::3], *FIRSTS[2::3])])
def test_leaps_equal_single_steps(first: int) -> None:
    num_leaps = num_preemptions = num_cached = 0
    for seed in range(first, first + CASES_PER_TEST):
        world = draw_world(seed)
        ahead_s = (None, None, 0.0, 0.004, 0.02)[seed % 5]
        options = replace(world.options, plans_ahead_s=ahead_s)
        report = compare(replace(world, options=options))
        num_leaps += report.num_leaps
        num_preemptions += sum(r.num_preemptions for r in report.requests)
        num_cached += sum(r.num_cached for r in report.requests)
    assert num_leaps > 50  # else nothing was compared
    assert num_preemptions > 10
    assert num_cached > 100


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("offset", [0.0, 0.25, -0.25])
def test_an_arrival_at_the_end_of_a_step(max_in_flight: int, offset: float) -> None:
    """Steps of one second each; a request that comes as one ends is seen by the next plan."""
    options = Options(max_in_flight=max_in_flight, block_size=4)
    times = (0.0, 10.0 + offset, 10.0 + offset, 30.0)
    work = tuple(Arrival(when, 3, 40, id=str(i)) for i, when in enumerate(times))
    machine = Machine(LinearPricer(1.0, 0.0, 0.0), 100)
    leaps, steps = (
        Simulation(machine, work, replace(options, macro_steps=on)).run() for on in (True, False)
    )
    assert leaps.num_leaps > 0
    assert leaps.requests == steps.requests
    late = {-0.25: 10.0, 0.0: 10.0, 0.25: 11.0}[offset]
    assert leaps.requests[1].started_s == late


@pytest.mark.parametrize(
    ("plans_ahead_s", "started_s", "first_s"), [(None, 11.0, 13.0), (0.25, 10.75, 12.0)]
)
def test_a_late_plan_takes_in_who_came_while_the_step_before_ran(
    plans_ahead_s: float | None, started_s: float, first_s: float
) -> None:
    """Steps of one second each; a request comes in the middle of one."""
    options = Options(block_size=4, plans_ahead_s=plans_ahead_s)
    work = (Arrival(0.0, 3, 40, id="a"), Arrival(10.5, 3, 10, id="b"))
    machine = Machine(LinearPricer(1.0, 0.0, 0.0), 100)
    report = Simulation(machine, work, options).run()
    assert report.num_leaps > 0
    assert report.requests[1].started_s == started_s
    assert report.requests[1].first_token_s == first_s
    assert report.requests[0].finished_s == 40.0


def test_a_leap_ends_before_the_horizon() -> None:
    """Whoever looks at the engine at the horizon finds it in the middle of a step."""
    simulation = Simulation(Machine(LinearPricer(1.0, 0.0, 0.0), 100), (Arrival(0.0, 3, 90),))
    engine = simulation.replicas[0].engine
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=90), 0.0)
    engine.executor.answers["r"] = Answer(3)
    engine.add(request)
    for end in (1.0, 2.0, 3.0):
        while engine.launch():
            pass
        engine.executor.clock.advance_to(end)
        engine.collect()
    leap = engine.leap(20.0)
    assert leap is not None
    assert leap.end_s == 19.0
    assert leap.run.num_steps == 16
    assert engine.num_in_flight == 1
    assert len(request.token_ids) == 3 + 19 + 1


def test_who_listens_to_steps_hears_every_one() -> None:
    """An engine that somebody watches does not leap."""

    class Watch(Listener):
        num_steps = 0

        def on_step(self, record: StepRecord) -> None:
            self.num_steps += 1

    watch = Watch()
    simulation = Simulation(Machine(LinearPricer(), 100), (Arrival(0.0, 3, 50),))
    simulation.replicas[0].engine.listeners.append(watch)
    report = simulation.run()
    assert report.num_leaps == 0
    assert watch.num_steps == report.num_steps == 50
