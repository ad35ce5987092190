"""Is every moment of a request put to one account, and to the right one?"""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ridgeline.clock import Clock
from ridgeline.cost.pricer import StepPrice
from ridgeline.engine import Engine
from ridgeline.observe.event_log import Added, EventLog, read_event_log
from ridgeline.observe.requests import PARTS, Parts, RequestTimes, TimeBreakdown, _Steady
from ridgeline.observe.run import Run
from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import Listener, PricedStep, StepPlan, StepResult, StepShape
from tests.observe.recorded import RecordedWorld


def price(shape: StepShape, num_logits: int) -> StepPrice:
    """A second for the step and one for each token."""
    tokens = sum(new for new, _ in shape)
    return StepPrice(1.0 + tokens, 0.5 * tokens, 100.0 * tokens, 10.0 * tokens)


class Ticking:
    """A clock on which every look takes a random while."""

    def __init__(self, seed: int) -> None:
        self.rng, self.time = random.Random(seed), 1000.0

    def now(self) -> float:
        self.time += self.rng.random() * self.rng.choice([0.0, 1e-6, 0.3])
        return self.time

    def advance_to(self, when: float) -> None:
        """The world asks for this; time passes by itself."""


def keep_accounts(engine: Engine, *, in_submit: bool) -> tuple[Run, RequestTimes]:
    run = Run(price, computes_in_submit=in_submit, max_finished=None)
    engine.listeners.append(run)
    return run, run.requests


def ticking_world(seed: int, path: Path, *, in_submit: bool) -> tuple[RecordedWorld, RequestTimes]:
    """A world on a ticking clock, in which requests wait a while before they come in."""
    world = RecordedWorld(seed, path)
    clock = Ticking(seed)
    world.clock = world.engine.clock = clock  # type: ignore[assignment]
    _, time_breakdowns = keep_accounts(world.engine, in_submit=in_submit)
    world.run(150)
    world.file.close()
    return world, time_breakdowns


@pytest.mark.every_value
@pytest.mark.parametrize("in_submit", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_parts_sum_to_the_latency(seed: int, in_submit: bool, tmp_path: Path) -> None:
    """In whatever world: forks, beams, drafts, preemptions, aborts at any moment, faults."""
    print("seed", seed)
    _, time_breakdowns = ticking_world(seed, tmp_path / "log", in_submit=in_submit)
    assert not time_breakdowns.active
    assert len(time_breakdowns.finished) > 5
    for breakdown in time_breakdowns.finished:
        assert breakdown.ended is not None
        assert abs(breakdown.parts.total - (breakdown.ended - breakdown.arrival)) < 1e-9
        assert min(getattr(breakdown.parts, name) for name in PARTS) >= 0.0
        assert (breakdown.parts.preemption > 0) <= (breakdown.num_preemptions > 0)


def test_the_worlds_have_every_kind_of_time(tmp_path: Path) -> None:
    """Else the test above would show little."""
    whole = Parts()
    for seed in range(12):
        _, time_breakdowns = ticking_world(seed, tmp_path / f"log{seed}", in_submit=seed % 2 == 0)
        for breakdown in time_breakdowns.finished:
            whole.add(breakdown.parts)
    assert min(getattr(whole, name) for name in PARTS) > 0.0


@pytest.mark.every_value
@pytest.mark.parametrize("in_submit", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_steps_that_are_alike_are_put_down_as_each_by_itself(
    seed: int, in_submit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of plain steps, and of such with drafts: those two in turns, too."""
    _, quick = ticking_world(seed, tmp_path / "quick", in_submit=in_submit)
    monkeypatch.setattr(_Steady, "of", lambda step, live: None)
    _, each = ticking_world(seed, tmp_path / "each", in_submit=in_submit)
    for one, other in zip(quick.finished, each.finished, strict=True):
        assert one.num_output_tokens == other.num_output_tokens
        assert (one.request_id, one.end) == (other.request_id, other.end)
        assert (one.first_token, one.until) == (other.first_token, other.until)
        if not one.num_preemptions:
            assert asdict(one.parts) == pytest.approx(asdict(other.parts))
            continue
        # Where a lost answer ended is known but for drafts that were in flight.
        for name in ("queue", "others_prefill", "host", "total"):
            assert getattr(one.parts, name) == pytest.approx(getattr(other.parts, name))


@pytest.mark.parametrize("seed", range(4))
def test_a_log_gives_the_same_accounts(seed: int, tmp_path: Path) -> None:
    _, time_breakdowns = ticking_world(seed, tmp_path / "log", in_submit=False)
    log = read_event_log(tmp_path / "log")
    again = Run(price, max_finished=None)
    log.feed(again)
    assert _ids(log)
    assert _nameless(again.requests) == _nameless(time_breakdowns)


def _nameless(time_breakdowns: RequestTimes) -> list[TimeBreakdown]:
    """A log tells tenants apart, and not who they are."""
    return [replace(breakdown, tenant="") for breakdown in time_breakdowns.finished]


def _ids(log: EventLog) -> list[str]:
    return [event.request_id for event in log.events if isinstance(event, Added)]


# ---------------------------------------------------------------------- one story, by hand


class Told:
    """A clock that says what it is told."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


class Slow:
    """An executor whose steps take as long as the test says, in `result`."""

    num_blocks, block_size = 64, 4

    def __init__(self, clock: Told) -> None:
        self.clock, self.seconds = clock, 1.0

    def submit(self, plan: StepPlan) -> _Result:
        return _Result(self, plan)


class _Result:
    def __init__(self, executor: Slow, plan: StepPlan) -> None:
        self.executor, self.plan = executor, plan

    def result(self) -> StepResult:
        self.executor.clock.time += self.executor.seconds
        return StepResult({e.request_id: (7,) for e in self.plan.scheduled if e.samples})


def story() -> tuple[Told, Slow, Engine, RequestTimes]:
    clock = Told()
    executor = Slow(clock)
    scheduler = Scheduler(BlockManager(64, 4), FCFS(), 64, 8)
    as_clock: Clock = clock
    engine = Engine(scheduler, executor, as_clock, 1)
    return clock, executor, engine, keep_accounts(engine, in_submit=False)[1]


def ask(name: str, num_prompt: int, num_output: int, arrival: float) -> Request:
    prompt = tuple(range(100, 100 + num_prompt))
    return Request(name, prompt, SamplingParams(max_tokens=num_output, seed=0), arrival)


def only(time_breakdowns: RequestTimes, name: str) -> TimeBreakdown:
    return next(breakdown for breakdown in time_breakdowns.finished if breakdown.request_id == name)


class ToldOf(Listener):
    """Keeps the steps of a run."""

    def __init__(self, steps: list[PricedStep]) -> None:
        self.steps = steps

    def on_priced(self, step: PricedStep) -> None:
        self.steps.append(step)


def test_one_request_alone() -> None:
    clock, executor, engine, time_breakdowns = story()
    clock.time = 2.0
    engine.add(ask("a", 9, 3, 0.5))
    clock.time = 3.0
    executor.seconds = 10.0
    engine.step()  # the prompt: 3 .. 13
    clock.time = 14.0
    executor.seconds = 1.0
    engine.step()  # 14 .. 15
    clock.time = 15.25
    engine.step()  # 15.25 .. 16.25
    a = only(time_breakdowns, "a")
    assert a.parts == Parts(queue=2.5, own_prefill=10.0, decode=2.0, host=1.25)
    assert (a.first_token, a.ended, a.end) == (13.0, 16.25, "length")
    assert (a.num_output_tokens, a.num_cached_tokens) == (3, 0)


def test_a_prompt_of_somebody_else_is_told_from_decoding() -> None:
    clock, executor, engine, time_breakdowns = story()
    engine.add(ask("a", 4, 3, 0.0))
    engine.step()
    engine.add(Request("b", (1, 2, 3, 4, 5, 6, 7), SamplingParams(max_tokens=1), clock.time))
    executor.seconds = 9.0  # priced 1 + 1 + 7 = 9, and 2 without the prompt
    engine.step()
    executor.seconds = 1.0
    engine.step()
    a, b = only(time_breakdowns, "a"), only(time_breakdowns, "b")
    assert a.parts.others_prefill == pytest.approx(7.0)
    assert a.parts.decode == pytest.approx(2.0 + 1.0)
    assert a.parts.own_prefill == 1.0
    assert b.parts == Parts(own_prefill=9.0)


def test_two_prompts_in_one_step_share_it() -> None:
    _, executor, engine, time_breakdowns = story()
    engine.add(ask("a", 6, 1, 0.0))
    engine.add(Request("b", tuple(range(12)), SamplingParams(max_tokens=1), 0.0))
    executor.seconds = 19.0
    engine.step()
    a, b = only(time_breakdowns, "a"), only(time_breakdowns, "b")
    assert (a.parts.others_prefill, a.parts.own_prefill) == pytest.approx((19 * 12 / 18, 19 / 3))
    assert (b.parts.others_prefill, b.parts.own_prefill) == pytest.approx((19 / 3, 19 * 12 / 18))


def test_idle_time_is_nobodys_and_no_host_time() -> None:
    clock, _, engine, time_breakdowns = story()
    steps: list[PricedStep] = []
    [run] = engine.listeners
    assert isinstance(run, Run)
    run.listeners.append(ToldOf(steps))
    engine.add(ask("a", 4, 1, 0.0))
    engine.step()
    clock.time = 100.0
    engine.add(ask("b", 4, 1, 100.0))
    clock.time = 100.5
    engine.step()
    assert [step.host_s for step in steps] == [0.0, 0.5]
    assert only(time_breakdowns, "b").parts == Parts(queue=0.5, own_prefill=1.0)


def test_an_abort_in_the_middle_of_a_step_counts_up_to_then() -> None:
    clock, executor, engine, time_breakdowns = story()
    engine.add(ask("a", 4, 5, 0.0))
    engine.step()
    engine.launch()
    clock.time += 0.25
    engine.abort("a")
    a = only(time_breakdowns, "a")
    assert a.parts == Parts(own_prefill=1.0, decode=0.25)
    assert a.end == "abort"
    executor.seconds = 5.0
    engine.collect()
    assert only(time_breakdowns, "a").parts.decode == 0.25


def test_what_was_lost_is_computed_again_on_the_account_of_preemption(tmp_path: Path) -> None:
    """Two requests outgrow the cache; the younger one loses its blocks and comes back."""
    clock = Told()
    executor = Slow(clock)
    scheduler = Scheduler(BlockManager(7, 2, prefix_caching=False), FCFS(), 64, 8)
    engine = Engine(scheduler, executor, clock, 1)
    _, time_breakdowns = keep_accounts(engine, in_submit=False)
    engine.add(ask("a", 4, 6, 0.0))
    engine.add(Request("b", (1, 2, 3, 4), SamplingParams(max_tokens=6), 0.0))
    while not engine.is_idle:
        engine.step()
    a, b = only(time_breakdowns, "a"), only(time_breakdowns, "b")
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)
    assert b.parts.preemption > 1.0
    for breakdown in (a, b):
        assert breakdown.parts.total == pytest.approx(breakdown.latency, abs=1e-12)


def test_a_finished_list_does_not_grow_for_ever() -> None:
    clock, _, engine, _ = story()
    run = Run(price, max_finished=3)
    time_breakdowns = run.requests
    engine.listeners[:] = [run]
    for i in range(10):
        engine.add(ask(f"r{i}", 2, 1, clock.time))
        engine.step()
    assert [breakdown.request_id for breakdown in time_breakdowns.finished] == ["r7", "r8", "r9"]
    assert time_breakdowns.num_finished == 10
    assert time_breakdowns.active == {}
