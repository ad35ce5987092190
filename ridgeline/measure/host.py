"""What does the host do for each step, whatever the device? The real loop on a device stub."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ridgeline.clock import WallClock
from ridgeline.engine import Engine
from ridgeline.measure.stopwatch import typical
from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import StepPlan, StepResult

BLOCK_SIZE = 16
NUM_STEPS = 60


@dataclass(frozen=True, slots=True)
class _Done:
    answer: StepResult

    def result(self) -> StepResult:
        return self.answer


class StubExecutor:
    """A device that is ready before it is asked."""

    block_size = BLOCK_SIZE

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def submit(self, plan: StepPlan) -> _Done:
        return _Done(
            StepResult({entry.request_id: (1,) for entry in plan.scheduled if entry.samples})
        )


def host_seconds(num_requests: int, context: int = 512) -> float:
    """Seconds of one decode step of the engine without its device."""
    blocks = -(-(context + 2 * NUM_STEPS + 128) // BLOCK_SIZE) * num_requests
    manager = BlockManager(
        blocks, BLOCK_SIZE, windows=(None,), prefix_caching=True, key=b"calibration"
    )
    scheduler = Scheduler(
        manager,
        FCFS(),
        max_num_batched_tokens=max(8192, num_requests),
        max_num_seqs=num_requests,
    )
    engine = Engine(scheduler, StubExecutor(blocks), WallClock(), max_in_flight=2)
    for number in range(num_requests):
        engine.add(_request(number, context))
    while any(r.num_computed_tokens < context for r in scheduler.requests.values()):
        engine.step()
    return _timed(engine)


def _request(number: int, context: int) -> Request:
    sampling = SamplingParams(max_tokens=2 * NUM_STEPS, temperature=0.0, ignore_eos=True, seed=0)
    prompt = tuple((number * 31 + i) % 997 for i in range(context))
    return Request(f"host-{number}", prompt, sampling, 0.0)


def _timed(engine: Engine) -> float:
    times = [time.perf_counter()]
    for _ in range(NUM_STEPS):
        engine.step()
        times.append(time.perf_counter())
    return typical([b - a for a, b in pairwise(times)])


def line_through(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(c0, c1) of seconds = c0 + c1 requests, least squares of the relative errors, neither
    negative."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    product = sum(
        w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)
    )
    slope = max(0.0, product / spread) if spread else 0.0
    return max(0.0, mean_y - slope * mean_x), slope
