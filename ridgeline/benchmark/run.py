"""How long does the engine take over a list of jobs? Drives it from inside the process."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence

from ridgeline.benchmark.jobs import Job
from ridgeline.benchmark.record import JobTimes, Run, StepSeen
from ridgeline.engine import Engine
from ridgeline.errors import EngineFault
from ridgeline.observe.pricing import PricedStep, Pricing
from ridgeline.request import FinishReason, Request, RequestOutput, SamplingParams
from ridgeline.step import Listener, StepRecord

_names = itertools.count()


def run_jobs(engine: Engine, jobs: Sequence[Job], pricing: Pricing | None = None) -> Run:
    """Offer each job at its time, step until all are answered. Raises EngineFault on failure.

    What each step had to move is known if `pricing`, which prices this engine's steps, is given."""
    return _Driver(engine, jobs, pricing).run()


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

    def __init__(self, engine: Engine, jobs: Sequence[Job], pricing: Pricing | None) -> None:
        self.engine = engine
        self.pricing = pricing
        self.priced: dict[int, PricedStep] = {}  # not collected yet
        self.waiting = deque(sorted(jobs, key=lambda job: job.arrival_s))
        self.times: dict[str, JobTimes] = {}
        self.live: set[str] = set()
        self.result = Run(engine.clock.now())

    def run(self) -> Run:
        self.engine.listeners.append(self)
        if self.pricing is not None:
            self.pricing.followers.append(self.on_priced)
        try:
            self._drive()
        finally:
            self.engine.listeners.remove(self)
            if self.pricing is not None:
                self.pricing.followers.remove(self.on_priced)
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
