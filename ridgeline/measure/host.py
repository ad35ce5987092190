"""What does the host do for each step, whatever the device? The real loop on a device stub."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ridgeline.clock import WallClock
from ridgeline.cost.pricer import StepPrice
from ridgeline.engine import Engine
from ridgeline.formats import MAX_DRAFT_TOKENS
from ridgeline.measure.stopwatch import typical
from ridgeline.observe.run import Run
from ridgeline.request import UNKNOWN_TOKEN, Request, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.speculation.controller import DraftLengthController
from ridgeline.step import StepPlan, StepResult

BLOCK_SIZE = 16
NUM_STEPS = 60
NUM_DRAFT_TOKENS = 4  # of a step whose host is timed
ROUNDS = 9  # of what is told from a difference


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


class DraftingStub(StubExecutor):
    """One that looks drafts up: there are always some, and `num_out` tokens come out."""

    def __init__(self, num_blocks: int, num_out: int) -> None:
        super().__init__(num_blocks)
        self.num_out = num_out

    def submit(self, plan: StepPlan) -> _Done:
        result = StepResult({})
        for entry in plan.scheduled:
            if entry.samples:
                name, num = entry.request_id, min(self.num_out, entry.num_draft + 1)
                result.token_ids[name] = (1,) * num
                result.draft_token_ids[name] = (UNKNOWN_TOKEN,) * NUM_DRAFT_TOKENS
                result.verified[name] = (min(num, entry.num_draft), num - 1)
        return _Done(result)


def _step_seconds(batch: int, context: int, num_drafts: int) -> float:
    """Of steps in which draft tokens cost next to nothing."""
    return 1e-3 * (1 + 0.01 * num_drafts)


def draft_seconds() -> tuple[float, float]:
    """Seconds of the host, more than for a step with a given number of drafts of which one token
    comes out: for choosing the number, and for each further token. Of one request, as what a step
    does for each is small beside the rest of it; differences of medians of rounds in turns. Beside
    a device at work a choice takes longer: there `StepBench.choosing` tells."""
    kinds = (
        (NUM_DRAFT_TOKENS, 1),
        (NUM_DRAFT_TOKENS, NUM_DRAFT_TOKENS + 1),
        (None, NUM_DRAFT_TOKENS + 1),
    )
    found: list[list[float]] = [[] for _ in kinds]
    for _ in range(ROUNDS):
        for times, (num_draft_tokens, num_out) in zip(found, kinds, strict=True):
            times.append(_timed(_drafting_engine(num_draft_tokens, num_out)))
    one_s, all_s, chosen_s = map(typical, found)
    return max(0.0, chosen_s - all_s), max(0.0, (all_s - one_s) / NUM_DRAFT_TOKENS)


def _drafting_engine(num_draft_tokens: int | None, num_out: int) -> Engine:
    """With one request in the middle of its answer; `num_draft_tokens` None: they are chosen."""
    controller = DraftLengthController(
        _step_seconds,
        acceptance=0.9,
        max_drafts=NUM_DRAFT_TOKENS,
        max_verified_tokens=MAX_DRAFT_TOKENS + 1,
        num_drafts=num_draft_tokens,
        looks_ahead=True,
    )
    context = 2 * BLOCK_SIZE
    num_tokens = (2 * NUM_STEPS + 2) * (NUM_DRAFT_TOKENS + 1)
    blocks = -(-(context + num_tokens + MAX_DRAFT_TOKENS) // BLOCK_SIZE)
    scheduler = Scheduler(
        BlockManager(blocks, BLOCK_SIZE, windows=(None,), prefix_caching=True, key=b"calibration"),
        FCFS(),
        max_num_batched_tokens=8192,
        max_num_seqs=1,
        num_drafts=NUM_DRAFT_TOKENS,
        draft_lengths=controller,
    )
    engine = Engine(scheduler, DraftingStub(blocks, num_out), WallClock(), max_in_flight=2)
    run = Run(lambda shape, num_logits: StepPrice(1e-3, 1e-3, 1.0, 1.0))
    run.listeners.append(controller)
    engine.listeners.append(run)
    engine.add(_request(0, context, num_tokens))
    for _ in range(NUM_STEPS):
        engine.step()
    return engine


def host_seconds(num_requests: int, context: int = 512) -> float:
    """Seconds of one decode step of the engine without its device."""
    blocks = -(-(context + 2 * NUM_STEPS + 128) // BLOCK_SIZE) * num_requests
    manager = BlockManager(
        blocks, BLOCK_SIZE, windows=(None,), prefix_caching=True, key=b"calibration"
    )
    scheduler = Scheduler(
        manager, FCFS(), max_num_batched_tokens=max(8192, num_requests), max_num_seqs=num_requests
    )
    engine = Engine(scheduler, StubExecutor(blocks), WallClock(), max_in_flight=2)
    for number in range(num_requests):
        engine.add(_request(number, context))
    while any(r.num_computed_tokens < context for r in scheduler.requests.values()):
        engine.step()
    return _timed(engine)


def _request(number: int, context: int, num_tokens: int = 2 * NUM_STEPS) -> Request:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, seed=0)
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
