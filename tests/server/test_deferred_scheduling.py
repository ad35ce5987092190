"""Plans that wait for who comes: first tokens are there sooner, and the device waits for nobody."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.clock import VirtualClock
from ridgeline.cost.pricer import StepPrice
from ridgeline.engine import Engine
from ridgeline.observe.run import Run
from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.server.engine_loop import LATELY, EngineLoop
from ridgeline.server.wire import Command, Event, Step, pack_add
from ridgeline.step import StepPlan, StepResult, StepShape
from tests.scheduler.policies.virtual_time import BLOCK_SIZE, Arrival, Linear, poisson

HOST_S = 1e-3  # of a plan and its way to the device
NUM_BLOCKS = 40_000


@dataclass(frozen=True, slots=True)
class Future:
    clock: VirtualClock
    plan: StepPlan
    ends_at: float

    def is_over(self) -> bool:
        return self.clock.now() >= self.ends_at

    def result(self) -> StepResult:
        self.clock.advance_to(self.ends_at)
        return StepResult({e.request_id: (7,) for e in self.plan.scheduled if e.samples})


class Device:
    """Steps take `pace` times their price, up to `jitter` more or less. `idle_s`: between steps,
    while somebody was answered."""

    num_blocks, block_size = NUM_BLOCKS, BLOCK_SIZE

    def __init__(self, clock: VirtualClock, jitter: float, pace: float) -> None:
        self.clock, self.jitter, self.pace = clock, jitter, pace
        self.rng = random.Random(3)
        self.free_at = self.idle_s = self.busy_s = 0.0
        self.num_steps = 0

    def memory_total(self) -> int:
        return 1

    memory_free = memory_total

    def submit(self, plan: StepPlan) -> Future:
        self.clock.advance_to(self.clock.now() + HOST_S)
        swing = self.rng.uniform(-self.jitter, self.jitter)
        seconds = Linear().seconds(plan.shape) * self.pace * (1 + swing)
        if any(new == 1 for new, _ in plan.shape):
            self.idle_s += max(0.0, self.clock.now() - self.free_at)
        self.free_at = max(self.free_at, self.clock.now()) + seconds
        self.busy_s += seconds
        self.num_steps += 1
        return Future(self.clock, plan, self.free_at)


class Closed(Exception):
    """Nobody will come any more."""


class Wire:
    """Requests come at their times; the clock goes on while nobody does."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.pending: list[Request] = []
        self.first_at: dict[str, float] = {}

    def take(self, *, wait_s: float) -> list[Command]:
        if wait_s == inf and not self.pending:
            raise Closed
        until = self.clock.now() + wait_s
        self.clock.advance_to(min(until, self.pending[-1].arrival_time) if self.pending else until)
        taken: list[Command] = []
        while self.pending and self.pending[-1].arrival_time <= self.clock.now():
            request = self.pending.pop()
            taken.append(pack_add(len(self.pending), [request], request.arrival_time))
        return taken

    def send(self, event: Event) -> None:
        assert isinstance(event, Step)
        for output in event.outputs:
            self.first_at.setdefault(output.request_id, self.clock.now())


class World:
    """The loop of the server, the engine and the scheduler on a virtual clock."""

    def __init__(
        self,
        *,
        is_late: bool = True,
        jitter: float = 0.0,
        pace: float = 1.0,
        max_num_seqs: int = 256,
    ) -> None:
        self.clock = VirtualClock()
        self.device = Device(self.clock, jitter, pace)
        blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, (None,), True, b"k")
        scheduler = Scheduler(blocks, FCFS(), 8192, max_num_seqs)
        engine = Engine(scheduler, self.device, self.clock, 2)
        self.run = Run(_price)
        self.run.request_costs = SimpleNamespace(get=lambda name: None)  # type: ignore[attr-defined]
        engine.listeners.append(self.run)
        self.wire = Wire(self.clock)
        served: Any = SimpleNamespace(engine=engine, device=self.device, run_record=self.run)
        self.loop = EngineLoop(served, self.wire, self.clock)
        assert self.loop.deferred_scheduling is not None
        self.late = self.loop.deferred_scheduling
        if not is_late:
            self.loop.deferred_scheduling = None

    def serve(self, arrivals: list[Arrival]) -> float:
        """Mean seconds to the first token."""
        now = self.clock.now()
        requests = [
            Request(
                f"{now}-{i}",
                tuple(i * 7919 + j for j in range(arrival.num_prompt)),
                SamplingParams(max_tokens=arrival.num_output),
                now + arrival.at,
            )
            for i, arrival in enumerate(arrivals)
        ]
        self.wire.pending = requests[::-1]
        with pytest.raises(Closed):
            self.loop.run()
        return fmean(self.wire.first_at[r.request_id] - r.arrival_time for r in requests)


def _price(shape: StepShape, num_logits: int) -> StepPrice:
    return StepPrice(Linear().seconds(shape), 1e-3, 1.0, 1.0)


def load() -> list[Arrival]:
    return poisson(random.Random(1), 20.0, 20.0, 128, 48)


@pytest.mark.parametrize(
    ("jitter", "pace"), [(0.0, 1.0), (0.1, 1.0), (0.1, 1.4), (0.1, 0.7), (0.3, 1.0)]
)
def test_first_tokens_come_sooner_and_the_device_does_not_wait(jitter: float, pace: float) -> None:
    plain = World(is_late=False, jitter=jitter, pace=pace)
    late = World(jitter=jitter, pace=pace)
    assert late.serve(load()) < (0.85 if jitter < 0.3 else 0.87) * plain.serve(load())
    assert late.late.num_waits > 1000
    assert late.late.num_late < 0.01 * late.device.num_steps
    assert late.device.idle_s < plain.device.idle_s + 0.001 * late.device.busy_s


@pytest.mark.parametrize("pace", [1.0, 20.0])
def test_a_device_that_becomes_faster_is_followed(pace: float) -> None:
    world = World(pace=pace)
    arrivals = poisson(random.Random(1), 20.0 / pace, 20.0 * pace, 128, 48)
    world.serve(arrivals)
    late, steps = world.late.num_late, world.device.num_steps
    world.device.pace *= 0.5
    world.serve(arrivals)
    assert 0 < world.late.num_late - late < 0.001 * (world.device.num_steps - steps)


def test_what_came_too_late_once_is_forgiven() -> None:
    world, plain = World(), World(is_late=False)
    world.serve(load())
    world.device.pace = 0.5
    world.serve(load())
    assert world.late.num_late > 0
    world.device.pace = 1.0
    world.serve(load())
    assert world.serve(load()) < 0.85 * plain.serve(load())


def test_a_step_that_nobody_was_behind_is_not_late() -> None:
    """Answers of one token, each step alone on a device that is done at once; then a long one."""
    world = World(pace=0.0)
    world.serve([Arrival(float(i), 5, 1) for i in range(2 * LATELY)])
    assert (world.late.num_late, world.late.num_waits) == (0, 0)
    world.device.pace = 1.0
    world.serve([Arrival(0.0, 5, 2)])
    assert world.device.num_steps == 2 * LATELY + 2


def test_steps_that_read_prompts_are_waited_for_once_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    waited, pause = list[bool](), world.late.pause

    def watched() -> float:
        running = world.run.running
        seconds = pause()
        if seconds > 0 and running is not None:
            waited.append(running.plan.decodes is None and running.plan.scheduled[-1].start == 0)
        return seconds

    monkeypatch.setattr(world.late, "pause", watched)
    world.serve([Arrival(0.0, 5, 300), *(Arrival(1.0 + i, 64, 4) for i in range(LATELY // 2))])
    assert waited
    assert not any(waited)
    world.serve([Arrival(0.0, 5, 900), *(Arrival(1.0 + i, 64, 4) for i in range(LATELY + 4))])
    assert any(waited)


def test_nothing_waits_without_work_or_before_enough_was_seen() -> None:
    world = World()
    assert world.late.pause() == 0
    world.serve([Arrival(0.0, 5, LATELY // 2)])
    assert world.late.num_waits == 0


def test_who_cannot_tell_whether_a_step_is_over_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True, slots=True)
    class Silent:
        clock: VirtualClock
        plan: StepPlan
        ends_at: float
        result = Future.result

    monkeypatch.setitem(globals(), "Future", Silent)
    world = World()
    world.serve([Arrival(0.0, 5, 100)])
    assert world.late.num_waits == 0


def test_a_full_engine_does_not_wait() -> None:
    two = [Arrival(0.0, 5, 100), Arrival(0.0, 5, 100)]
    full, roomy = World(max_num_seqs=2), World()
    full.serve(two)
    roomy.serve(two)
    assert full.late.num_waits == 0
    assert roomy.late.num_waits > 50
    assert full.clock.now() == pytest.approx(roomy.clock.now())
