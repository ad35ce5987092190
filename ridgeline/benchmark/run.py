"""How long does the engine take over a list of jobs, and what do its times amount to?

Drives the engine from inside the process; keeps the times of steps and tokens, and sums them up."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ridgeline.benchmark.jobs import Job
from ridgeline.engine import Engine
from ridgeline.errors import EngineFault
from ridgeline.observe.evidence import RunRecord
from ridgeline.request import FinishReason, Request, RequestOutput, SamplingParams
from ridgeline.step import Listener, PricedStep, StepRecord


@dataclass(slots=True)
class JobTimes:
    """Seconds of one clock. `due_s` is when the request was meant to arrive, not when it did,
    so that a stalled engine cannot hide the wait of those behind it."""

    due_s: float
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.token_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between neighbouring tokens: the inter-token latencies."""
        return [b - a for a, b in pairwise(self.token_s)]


@dataclass(slots=True)
class StepSeen:
    """One step: when it was collected, how many tokens it gave, and to how many requests.

    `bytes` is what it had to move by its price (None: nobody priced it). `drafts`: it made drafts
    before it checked them; what that reads is in no price."""

    ended_s: float
    num_tokens: int
    num_rows: int = 0
    bytes: float | None = None
    drafts: bool = False


@dataclass(slots=True)
class Run:
    """One run, by steps and by jobs."""

    started_s: float
    ended_s: float = 0.0
    steps: list[StepSeen] = field(default_factory=list)
    jobs: list[JobTimes] = field(default_factory=list)
    most_running: int = 0
    failed: int = 0

    @property
    def wall_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def num_tokens(self) -> int:
        return sum(len(job.token_s) for job in self.jobs)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """How some durations are spread, in milliseconds."""

    p50: float
    p90: float
    p99: float
    mean: float


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest of the sorted values; 0 for none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread_ms(seconds: Sequence[float]) -> Spread:
    """Percentiles and mean in milliseconds of durations in seconds."""
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    p50, p90, p99 = (percentile(seconds, share) * 1e3 for share in (0.5, 0.9, 0.99))
    return Spread(p50, p90, p99, mean * 1e3)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Steps that followed each other without a break: seconds from the end of the one before them
    to their own end, and what they gave and moved meanwhile."""

    seconds: float
    num_steps: int
    num_tokens: int
    bytes: float | None
    drafts: bool

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_s(self) -> float | None:
        if self.bytes is None or self.seconds <= 0:
            return None
        return self.bytes / self.seconds

    @property
    def bytes_per_step(self) -> float | None:
        return None if self.bytes is None else self.bytes / self.num_steps

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps


def throughput_of(began_s: float, steps: Sequence[StepSeen]) -> Throughput:
    """Of at least one step; `began_s` is when the device was done with the one before."""
    known = [step.bytes for step in steps if step.bytes is not None]
    return Throughput(
        steps[-1].ended_s - began_s,
        len(steps),
        sum(step.num_tokens for step in steps),
        sum(known) if len(known) == len(steps) else None,
        any(step.drafts for step in steps),
    )


def steady_steps(steps: Sequence[StepSeen], batch: int) -> Sequence[StepSeen]:
    """The longest run of consecutive steps that gave every one of `batch` requests a token, or
    several where drafts were right: decode alone, without the steps in which the batch fills or
    empties."""
    best, start = range(0), 0
    for index, step in enumerate(steps):
        if step.num_rows != batch:
            start = index + 1
        elif index + 1 - start > len(best):
            best = range(start, index + 1)
    return steps[best.start : best.stop]


_names = itertools.count()


def run_jobs(engine: Engine, jobs: Sequence[Job], record: RunRecord | None = None) -> Run:
    """Offer each job at its time, step until all are answered. Raises EngineFault on failure.

    What each step had to move is known if the `record` of the engine's own run is given."""
    return _Driver(engine, jobs, record).run()


def run_static(engine: Engine, jobs: Sequence[Job], slots: int) -> Run:
    """The same jobs as static batches: the next `slots` start when the last of a batch ends."""
    start = engine.clock.now()
    parts = [run_jobs(engine, jobs[i : i + slots]) for i in range(0, len(jobs), slots)]
    return joined(start, parts)


def joined(start: float, parts: Iterable[Run]) -> Run:
    """Runs that followed each other, as one."""
    whole = Run(start)
    for part in parts:
        whole.steps += part.steps
        whole.jobs += part.jobs
        whole.most_running = max(whole.most_running, part.most_running)
        whole.ended_s = part.ended_s
    return whole


class _Driver(Listener):
    """Offers jobs, steps the engine and, as its listener, counts what each step did and, by its
    price, what it had to move."""

    def __init__(self, engine: Engine, jobs: Sequence[Job], record: RunRecord | None) -> None:
        self.engine = engine
        # Who tells this listener, of what the engine does and of prices.
        self.tellers = [engine.listeners, *([] if record is None else [record.listeners])]
        self.priced: dict[int, PricedStep] = {}  # not collected yet
        self.waiting = deque(sorted(jobs, key=lambda job: job.arrival_s))
        self.times: dict[str, JobTimes] = {}
        self.live: set[str] = set()
        self.result = Run(engine.clock.now())

    def run(self) -> Run:
        for listeners in self.tellers:
            listeners.append(self)
        try:
            self._drive()
        finally:
            for listeners in self.tellers:
                listeners.remove(self)
            for request_id in self.live:
                self.engine.abort(request_id)
        self.result.ended_s = self.engine.clock.now()
        self.result.jobs = list(self.times.values())
        return self.result

    def on_priced(self, step: PricedStep) -> None:
        """Comes before `on_step` of the same step."""
        self.priced[step.plan.step_id] = step

    def on_step(self, record: StepRecord) -> None:
        seen = StepSeen(record.collected_at, record.num_new_tokens)
        seen.num_rows = sum([bool(output.new_token_ids) for output in record.outputs])
        priced = self.priced.pop(record.plan.step_id, None)
        if priced is not None:
            seen.bytes, seen.drafts = priced.price.bytes, priced.drafting_s > 0
        self.result.steps.append(seen)
        self.result.most_running = max(self.result.most_running, len(record.plan.scheduled))

    def _drive(self) -> None:
        while self.waiting or self.live:
            self._offer()
            if self.live:
                self._step()
            else:
                self._wait()

    def _elapsed(self) -> float:
        return self.engine.clock.now() - self.result.started_s

    def _offer(self) -> None:
        elapsed = self._elapsed()
        while self.waiting and self.waiting[0].arrival_s <= elapsed:
            job = self.waiting.popleft()
            request = _request(job, self.result.started_s + job.arrival_s)
            self.times[request.request_id] = JobTimes(request.arrival_time)
            self.live.add(request.request_id)
            self.engine.add(request)

    def _wait(self) -> None:
        time.sleep(max(0.0, self.waiting[0].arrival_s - self._elapsed()))

    def _step(self) -> None:
        outputs = self.engine.step()
        now = self.engine.clock.now()
        for output in outputs:
            self._take(output, now)

    def _take(self, output: RequestOutput, now: float) -> None:
        if output.finish_reason is FinishReason.ERROR:
            raise EngineFault(output.error or "the engine failed")
        if output.request_id not in self.live:
            return
        self.times[output.request_id].token_s += [now] * len(output.new_token_ids)
        if output.finish_reason is not None:
            self.live.discard(output.request_id)


def _request(job: Job, arrival: float) -> Request:
    sampling = SamplingParams(
        max_tokens=job.num_output_tokens, temperature=job.temperature, ignore_eos=True, seed=0
    )
    return Request(f"bench-{next(_names)}", job.prompt, sampling, arrival)
